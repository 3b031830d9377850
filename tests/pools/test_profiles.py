"""Workers of several kinds, pools that belong to a run, and workers whose sandboxes are at Modal."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import BackendUnavailable, SandboxSpec, SettingsError, create_backend
from lachesis_pools.places import published
from lachesis_pools.profiles import ProfileSettings, read_profiles
from tests.support.modal_server import ModalServer
from tests.support.pool_engine import workers
from tests.support.scripted_server import ScriptedServer
from tests.support.small_envs import ROOT, SortWords, make, sorts

PROFILES = """\
profiles:
  default: {slots: 2, spec: {env: {WHICH: plain}}}
  large: {slots: 1, most: 2, spec: {env: {WHICH: large}, memory_bytes: 536870912}}
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "profiles.yaml").write_text(PROFILES)


@pytest.fixture(scope="module")
def modal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModalServer]:
    with ModalServer(tmp_path_factory.mktemp("modal")) as server:
        yield server
    assert server.unbuilt == set()


@pytest.fixture
def of_modal(modal: ModalServer, monkeypatch: pytest.MonkeyPatch) -> ModalServer:
    monkeypatch.setenv("MODAL_SERVER_URL", modal.url)
    monkeypatch.setenv("MODAL_TOKEN_ID", modal.credentials[0])
    monkeypatch.setenv("MODAL_TOKEN_SECRET", modal.credentials[1])
    modal.created.clear()
    return modal


class Large(SortWords):
    """Its apples need more."""

    def sandbox_for(self, item: Any, spec: SandboxSpec) -> SandboxSpec:
        return replace(spec, labels={**spec.labels, "profile": "large"}) if "apple" in item else spec

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        which = "large" if "apple" in item else "plain"
        assert (await ctx.terminal("printenv WHICH"))["output"].strip() == which
        return float(await super().compute_reward(item, result, ctx))  # type: ignore[no-untyped-call]


async def test_each_item_goes_to_workers_of_its_profile_in_a_pool_that_ends_with_the_run(tmp_path: Path) -> None:
    options = {"up": f"--profiles {tmp_path / 'profiles.yaml'}"}
    async with ScriptedServer(sorts) as server:
        env = make(Large, server, tmp_path, terminal_backend="pool", terminal_options=options)
        await env.process_manager()
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert [group["scores"] for group in groups] == [[1.0, 1.0]] * 2
    assert published() == {} and workers("run-") == []
    assert [path.name for path in (tmp_path / "state/lachesis/pools").rglob("run-*")] == [], "nothing went wrong"


async def test_a_profile_that_no_worker_has_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    backend = create_backend("pool", up=f"--profiles {tmp_path / 'profiles.yaml'}", profile="huge")
    with pytest.raises(BackendUnavailable, match="no profile 'huge', but '', 'large'"):
        await backend.create(SandboxSpec())
    sandbox = await backend.create(SandboxSpec(labels={"profile": "default"}))
    assert (await sandbox.exec("printenv WHICH", timeout=20)).stdout == b"plain\n"
    await sandbox.close()
    await backend.close()  # type: ignore[attr-defined]


async def test_a_rollout_that_may_outlive_every_worker_is_refused_at_the_start() -> None:
    backend = create_backend("pool", up="--lifetime 600")
    with pytest.raises(
        BackendUnavailable, match=r"live 600 s, of which a rollout can have 480 s, and a sandbox .* 3600 s .*Next"
    ):
        await backend.create(SandboxSpec())
    await (await backend.create(SandboxSpec(lifetime=300.0))).close()
    await backend.close()  # type: ignore[attr-defined]


def test_a_run_that_is_killed_ends_its_pool_and_the_workers(tmp_path: Path) -> None:
    code = (
        "import asyncio\nfrom backends import SandboxSpec, create_backend\n"
        "async def main():\n"
        "    sandbox = await create_backend('pool', up='--slots 2').create(SandboxSpec())\n"
        "    await sandbox.start('sleep 1000')\n"
        "    print('ready', flush=True)\n    await asyncio.sleep(1000)\nasyncio.run(main())\n"
    )
    run = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    [name] = published()
    assert len(workers(name)) == 1
    run.kill()
    run.wait()
    end = time.monotonic() + 60
    while (workers(name) or published()) and time.monotonic() < end:
        time.sleep(0.1)
    assert workers(name) == [] and published() == {}


async def test_a_pool_of_a_run_that_cannot_start_says_why() -> None:
    backend = create_backend("pool", up="--engine slurm --engine-option hosts=a")
    available = await backend.check()
    assert not available.ok and "unexpected keyword argument 'hosts'" in available.detail


async def test_a_pool_of_a_run_that_has_ended_is_no_reason_to_wait() -> None:
    backend = create_backend("pool", up="--engine none", start_timeout=300.0)
    assert (await backend.check()).ok
    [name] = published()
    waiting = asyncio.create_task(backend.create(SandboxSpec()))
    await asyncio.sleep(0.3)
    os.kill(published()[name]["pid"], signal.SIGKILL)
    with pytest.raises(BackendUnavailable, match="the pool of this run has ended"):
        await asyncio.wait_for(waiting, 30)
    await backend.close()  # type: ignore[attr-defined]
    assert published() == {}


@pytest.mark.slow
async def test_sandboxes_at_modal_get_what_their_profile_asks_for(tmp_path: Path, of_modal: ModalServer) -> None:
    (tmp_path / "modal_profiles.yaml").write_text(
        "profiles:\n"
        "  default: {image: 'python:3.12', cpu: 1.0, memory: 512, slots_per_sandbox: 2, max_sandboxes: 1}\n"
        "  gpu: {image: 'python:3.12', gpu: T4, cpu: 2.0, memory: 1024, slots_per_sandbox: 1, app_name: training}\n"
    )
    backend = create_backend("pool", up=f"--engine modal --profiles {tmp_path / 'modal_profiles.yaml'}")
    plain, gpu = await asyncio.gather(
        backend.create(SandboxSpec()), backend.create(SandboxSpec(labels={"profile": "gpu"}))
    )
    assert (await gpu.exec("echo on", timeout=20)).stdout == b"on\n" != (await plain.exec("pwd", timeout=20)).stdout
    resources = [request.definition.resources for request in of_modal.created]
    sent = {each.gpu_config.gpu_type: each for each in resources}
    assert {*sent} == {"", "T4"}
    assert (sent[""].milli_cpu_max, sent[""].memory_mb_max) == (1000, 512)
    assert (sent["T4"].milli_cpu_max, sent["T4"].memory_mb_max) == (2000, 1024)
    assert {name for _, name in of_modal.apps} >= {"lachesis", "training"}
    await asyncio.gather(plain.close(), gpu.close())
    await backend.close()  # type: ignore[attr-defined]
    assert all(box.result is not None for box in of_modal.boxes.values())


def test_profiles_that_say_something_unknown_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "more.yaml"
    path.write_text("profiles: {a: {slotz: 3}}")
    with pytest.raises(SettingsError, match=r"profile 'a' has no 'slotz', but backend, .*slots"):
        read_profiles(str(path), ProfileSettings())
    for wrong, message in (
        ("{slots: '4'}", "slots of a pool is a number"),
        ("{memory: 64Gi}", "memory is a number of MiB"),
        ("{engine_options: null}", "engine_options maps names"),
        ("{lifetime: 1h}", "lifetime of a pool is a number"),
    ):
        path.write_text(f"profiles: {{a: {wrong}}}")
        with pytest.raises(SettingsError, match=message):
            read_profiles(str(path), ProfileSettings())
    path.write_text("- a")
    with pytest.raises(SettingsError, match="Next step: write"):
        read_profiles(str(path), ProfileSettings())
    path.write_text("profiles: {default: {slots: 3}, gpu: {}}")
    base = ProfileSettings(most=7)
    assert read_profiles(str(path), base) == {"": replace(base, slots=3), "gpu": base}
