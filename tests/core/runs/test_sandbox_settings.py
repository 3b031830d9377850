"""Settings that say what a sandbox is, an item's own wishes, and the command that lists and removes sandboxes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import platform
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from backends import BackendUnavailable, SandboxLost, SandboxSpec, create_backend
from lachesis.runs import command_line as cli
from lachesis.runs.resources import loop_limits, sandbox_lifetime
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client import ServerSettings
from lachesis_client.sampling import read_sampling, sampling_fields
from lachesis_tokens.engines import create_engine
from lachesis_tokens.engines.http_engine import HttpEngine
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, make, process, rollouts


def test_every_setting_reaches_the_spec() -> None:
    config = HermesAgentEnvConfig(
        terminal_image="python:3.12",
        terminal_workdir="/testbed",
        terminal_env={"A": "b"},
        terminal_network=True,
        terminal_cpus=1.5,
        terminal_memory=512,
        terminal_pids=100,
        terminal_disk=64,
        terminal_lifetime=60,
    )
    assert config.sandbox_spec({"run": "r"}) == SandboxSpec(
        image="python:3.12",
        workdir="/testbed",
        env={"A": "b"},
        network=True,
        cpus=1.5,
        memory_bytes=512 << 20,
        pids=100,
        disk_bytes=64 << 20,
        lifetime=60.0,
        labels={"run": "r"},
    )
    assert HermesAgentEnvConfig().sandbox_spec({}) == SandboxSpec(), "nothing said, nothing asked for"


def test_a_lifetime_that_is_too_short_is_named_where_somebody_chose_it(caplog: pytest.LogCaptureFixture) -> None:
    for lifetime in ({}, {"terminal_lifetime": 3600}):
        config = HermesAgentEnvConfig(rollout_timeout=1800.0, reward_timeout=1920.0, **lifetime)
        assert sandbox_lifetime(config, loop_limits(config, training=False)) > 3720, "enough in both cases"
        assert ("env.terminal_lifetime 3600 s is less than" in caplog.text) == bool(lifetime)


def test_values_of_variables_are_written_down_nowhere_and_yet_a_change_shows() -> None:
    one, two = (HermesAgentEnvConfig(terminal_env={"TOKEN": value}) for value in ("very-secret-1", "very-secret-2"))
    for shown in (one.public(), one.about_content(evaluation=False)):
        assert "TOKEN" in shown["terminal_env"] and "very-secret" not in str(shown)
    assert one.about_content(evaluation=False) != two.about_content(evaluation=False)


def test_options_are_the_backends_own_and_no_isolation_is_only_the_local_ones() -> None:
    assert HermesAgentEnvConfig(sandbox="none").backend_options() == {"isolation": "none"}
    remote = HermesAgentEnvConfig(terminal_backend="ssh", terminal_options={"host": "worker-1"})
    assert remote.backend_options() == {"host": "worker-1"}
    assert "terminal_options" not in remote.about_content(evaluation=False), (
        "another host does not change what is played"
    )
    with pytest.raises(ValidationError, match="sandbox: none is a setting of the local backend"):
        HermesAgentEnvConfig(sandbox="none", terminal_backend="docker")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"terminal_backend": "dokcer"}, "no backend called 'dokcer'. Did you mean 'docker'?"),
        ({"terminal_options": {"isolatoin": "none"}}, "isolatoin"),
        ({"terminal_workdir": "relative"}, "absolute path"),
        ({"terminal_backend": "ssh"}, "needs its option host"),
        ({"terminal_image": "/nowhere/root"}, "/nowhere/root"),
        (
            {"terminal_disk": 64, "terminal_memory": 32},
            r"raise memory_bytes, .*\(memory_bytes is env.terminal_memory, in MiB; disk_bytes is env.terminal_disk",
        ),
        ({"terminal_backend": "docker", "terminal_options": {"url": "unix:///nowhere/docker.sock"}}, "docker"),
    ],
)
async def test_what_cannot_work_is_said_before_the_first_rollout(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async with ScriptedServer([say("never asked")]) as server:
        env = make(SortWords, server, tmp_path, total_steps=1, **settings)
        with pytest.raises(BackendUnavailable, match=message):
            await env.process_manager()
    assert server.requests == []


async def test_an_item_may_have_a_sandbox_of_its_own(tmp_path: Path) -> None:
    seen: list[str] = []

    class Own(SortWords):
        def sandbox_for(self, item: Any, spec: SandboxSpec) -> SandboxSpec:
            return dataclasses.replace(spec, workdir="/workspace/of/this", env={**spec.env, "ITEM": item})

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            shown = (await ctx.terminal("pwd; echo $ITEM$RUN"))["output"].split("\n")
            verifier = await ctx.seal([])
            seen.extend([*shown, (await verifier.terminal("echo $ITEM"))["output"]])
            return 1.0

    script = [call(("terminal", {"command": "true"})), say("Done.")]
    settings = {"total_steps": 1, "group_size": 1, "terminal_env": {"RUN": "!"}}
    ran = await process(Own, tmp_path, script, **settings)
    assert rollouts(ran.files.groups)[0]["traceback"] is None
    assert seen == ["/workspace/of/this", "pear fig apple!", "", "pear fig apple\n"]


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "lachesis", "sandboxes", *arguments]
    env = {**os.environ, **variables}
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False, env=env)


async def test_sandboxes_are_listed_and_removed_by_any_process() -> None:
    run = f"run-{secrets.token_hex(4)}"  # others on this machine may run this test
    labels = {"run_id": run, "task_id": "task-7"}
    sandbox = await create_backend("local").create(SandboxSpec(labels=labels))
    listed = await asyncio.to_thread(command, "list", "--backend", "local")
    lines = [line for line in listed.stdout.splitlines() if sandbox.id in line]
    assert len(lines) == 1 and all(word in lines[0] for word in ("local", "in use", run, "task-7"))
    spared = await asyncio.to_thread(command, "reap", "--backend", "local", "--run", run)
    assert (spared.returncode, spared.stderr) == (0, "0 sandboxes removed\n"), "its environment is alive"
    taken = ["reap", "--backend", "local", "--run", run, "--everyone"]
    removed = await asyncio.to_thread(command, *taken)
    assert (removed.returncode, removed.stderr) == (0, "1 sandbox removed\n") and sandbox.id in removed.stdout
    with pytest.raises(SandboxLost):
        await sandbox.exec("true", timeout=10)
    await sandbox.close()


def test_a_backend_that_cannot_be_asked_is_an_error_only_when_it_was_named() -> None:
    named = command("list", "--backend", "docker", "--options", "{url: 'unix:///nowhere/docker.sock'}")
    assert named.returncode == 1 and "error: " in named.stderr and "Docker engine" in named.stderr
    assert command("list", "--options", "{host: a}").returncode == 2
    assert command("list", "--backend", "ssh", "--options", "{host: [").returncode == 2


async def test_a_backend_that_works_here_and_fails_is_never_passed_over(tmp_path: Path) -> None:
    async def about(_: web.Request) -> web.Response:
        return web.json_response({"ApiVersion": "1.41", "Version": "20", "Arch": platform.machine(), "Os": "linux"})

    async def fails(_: web.Request) -> web.Response:
        return web.json_response({"message": "the engine's store is damaged"}, status=500)

    app = web.Application()
    app.router.add_get("/version", about)
    for path, answer in (("version", about), ("info", about), ("containers/json", fails)):
        app.router.add_get("/{api}/" + path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(tmp_path / "s")).start()
        done = await asyncio.to_thread(command, "reap", DOCKER_HOST=f"unix://{tmp_path}/s", DOCKER_CONTEXT="")
    finally:
        await runner.cleanup()
    assert done.returncode == 1 and "error: docker: " in done.stderr and "store is damaged" in done.stderr


def test_secrets_of_other_settings_are_written_nowhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (
        HermesAgentEnvConfig(rollout_server_url="http://user:pw-secret@host:8000", extra_body={"key": {"in": value}})
        for value in ("eb-secret-1", "eb-secret-2")
    )
    for written in (one.public(), one.about_content(evaluation=False)):
        assert "key" in written["extra_body"] and "secret" not in str(written)
    assert one.public()["rollout_server_url"] == "http://host:8000"
    assert one.about_content(evaluation=False) != two.about_content(evaluation=False)

    judge = {"base_url": "http://judge/v1", "api_key": "sk-secret", "headers": {"X-Gateway": "hd-secret"}}
    assert HermesAgentEnvConfig(judge_server=judge).public()["judge_server"] == {"base_url": "http://judge/v1"}
    assert "secret" not in repr(ServerConfig(api_key="sk-secret", headers={"X-Gateway": "hd-secret"}))
    with pytest.raises(ValueError, match="api_key") as raised:
        ServerConfig(api_key=123456789)  # type: ignore[arg-type]
    assert "123456789" not in str(raised.value)
    file = tmp_path / "settings.yaml"
    for content in ("openai: {api_key: 123456789}", "env: {terminal_env: {TOKEN: 987654321}}"):
        file.write_text(content)
        assert cli.main(SortWords, ["process", "--config", str(file)]) == 2
    shown = capsys.readouterr().err
    assert "openai.api_key: must be text" in shown and "env.terminal_env.TOKEN: " in shown
    assert "123456789" not in shown and "987654321" not in shown


def test_a_server_extra_body_is_recorded_as_far_as_it_changes_the_sampling() -> None:
    body = {"proxy_key": "eb-secret", "top_p": 0.5, "min_tokens": 3}
    engine = create_engine("vllm", ServerSettings("http://x/v1", "m", extra_body=body))
    assert isinstance(engine, HttpEngine)
    record = engine.record(read_sampling({}, default_max_tokens=5, settings=sampling_fields(body)))
    assert "proxy_key" not in record and (record["top_p"], record["min_tokens"]) == (0.5, 3)
