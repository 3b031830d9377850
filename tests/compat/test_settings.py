"""Settings of the removed stack: what works, what is named, and what stays an error."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import Any

import pytest
from pydantic import AliasChoices, Field

from lachesis import HermesAgentEnvConfig, ServerConfig
from lachesis.runs import command_line as cli
from lachesis.settings.settings import UnknownSetting
from lachesis_tools import ToolsetError, tool
from lachesis_tools.builtin import BUILTIN_TOOLS
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, does_nothing, lines, make, process, rollouts, sorts


def test_an_unknown_setting_in_code_is_left_out_with_a_warning_that_names_it() -> None:
    with pytest.warns(UnknownSetting, match="has no setting group_sise, other: left out") as caught:
        config = HermesAgentEnvConfig(group_sise=3, other=1, group_size=2)  # type: ignore[call-arg]
    assert config.group_size == 2
    assert Path(caught[0].filename) == Path(__file__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HermesAgentEnvConfig(tool_pool_size=3, modal_gpu="A10", nomad_address="http://x:4646", driver="singularity")


def test_an_environments_own_fields_may_have_aliases_and_names_of_the_removed_stack(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Config(HermesAgentEnvConfig):
        driver: str = Field(default="firefox", description="The browser.")
        pages: int = Field(default=1, validation_alias=AliasChoices("pages", "sites"))
        words: int = Field(default=1, alias="max_words")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config = Config(driver="chrome", sites=5, max_words=6)  # type: ignore[call-arg]
    assert (config.pages, config.words, config.public()["driver"]) == (5, 6, "chrome")

    class Browses(SortWords):
        env_config_cls = Config

    cli.read_settings(Browses, ["process", "--env.driver", "chrome"])
    assert "change nothing" not in capsys.readouterr().err


def test_in_flags_and_files_it_stays_an_error(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("env: {group_sise: 3}")
    with pytest.raises(cli.SettingsError, match=r"env.group_sise; did you mean group_size"):
        cli.read_settings(SortWords, ["process", "--config", str(tmp_path / "settings.yaml")])
    with pytest.raises(SystemExit):
        cli.read_settings(SortWords, ["process", "--env.group_sise", "3"])


def test_settings_of_pools_are_accepted_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Pooled(SortWords):
        driver = "its own attribute"

        @classmethod
        def config_init(cls) -> Any:
            return cls.env_config_cls(purge_job_on_start=True), super().config_init()[1]

    _, settings = cli.read_settings(Pooled, ["process", "--env.tool_pool_size", "9", "--env.modal_min_sandboxes", "2"])
    assert settings["config"].tool_pool_size == 9
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "pools" in line]
    for name in ("env.purge_job_on_start", "env.tool_pool_size", "env.modal_min_sandboxes"):
        assert name in said
    assert Pooled.driver == "its own attribute"


def test_settings_of_a_pool_that_is_asked_for_make_one(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--env.tool_pool_mode", "nomad", "--env.driver", "singularity", "--env.singularity_image", "/shared/w.sif"]
    flags += ["--env.slots_per_container", "4", "--env.purge_job_on_start", "true"]
    _, settings = cli.read_settings(SortWords, ["process", *flags])
    config = settings["config"]
    assert config.terminal_backend == "pool"
    words = config.terminal_options["up"].split()
    for option in ("address=http://localhost:4646", "driver=singularity", "image=/shared/w.sif"):
        assert option in words
    assert words[words.index("--slots") + 1] == "4" and words[words.index("--most") + 1] == "10"
    said = capsys.readouterr().err
    assert "env.purge_job_on_start" in said and "env.driver" not in said

    modal = HermesAgentEnvConfig(
        tool_pool_mode="modal", modal_gpu="T4", modal_memory=512, modal_env_vars="A=1; B=two", allow_network=False
    )
    words = shlex.split(modal.terminal_options["up"])
    spec = json.loads(words[words.index("--spec") + 1])
    assert spec == {"image": "python:3.11", "cpus": 1.0, "memory_bytes": 512 << 20}
    assert modal.terminal_env == {"A": "1", "B": "two"}, "in no argument, which every user of a machine can read"
    assert "gpu=T4" in words and words[words.index("--slots") + 1] == "10"
    with pytest.raises(ValueError, match="modal_secrets names secrets without their variables"):
        HermesAgentEnvConfig(tool_pool_mode="modal", modal_secrets=["token"])
    assert HermesAgentEnvConfig(tool_pool_mode="modal", terminal_options={"url": "http://x:1"}).terminal_options == {
        "url": "http://x:1"
    }, "what is given today takes precedence"


@pytest.mark.parametrize(("flags", "value"), [([], False), ([""], True), (["false"], False), (["True"], True)])
def test_slurm_and_testing_take_a_value(flags: list[str], value: bool) -> None:
    given = [part for name in ("--slurm", "--testing") for flag in flags for part in (name, flag) if part]
    _, settings = cli.read_settings(SortWords, ["process", *given])
    assert (settings["slurm"], settings["testing"]) == (value, value)
    with pytest.raises(SystemExit):
        cli.read_settings(SortWords, ["process", "--slurm", "maybe"])


async def test_a_distribution_is_drawn_once_a_group_and_written_down(tmp_path: Path) -> None:
    async with ScriptedServer(does_nothing) as server:
        env = make(SortWords, server, tmp_path, distribution="development", total_steps=12, enabled_toolsets=None)
        await env.process_manager()
    groups = lines(tmp_path / "groups.jsonl")
    drawn = {group["item_key"]: group["toolsets"] for group in groups}
    assert len({tuple(toolsets) for toolsets in drawn.values()}) > 1
    assert {toolset for toolsets in drawn.values() for toolset in toolsets} == {"terminal", "file"}
    for key, toolsets in drawn.items():
        assert env.group_tools(key)[0] == toolsets
    offered = [{each["function"]["name"] for each in group["tools"]} for group in groups]
    for group, names in zip(groups, offered, strict=True):
        assert ("terminal" in names) == ("terminal" in group["toolsets"])
        assert ("read_file" in names) == ("file" in group["toolsets"])
    said = (tmp_path / "console.txt").read_text()
    assert said.count("have no tools here: moa, web, vision") == 1
    tools, names = env._resolve_tools_for_group()
    assert names == {each["function"]["name"] for each in tools} and names


async def test_toolsets_of_the_removed_stack_are_left_out_unless_the_environment_has_them(tmp_path: Path) -> None:
    @tool(toolset="web")
    async def web_search(query: str) -> str:
        """Search.

        Args:
            query: What for.
        """
        return f"about {query}"

    class Web(SortWords):
        tools = BUILTIN_TOOLS.extended(web_search)

    own = make(Web, "http://x/v1", tmp_path, enabled_toolsets=["web"])
    assert [each["function"]["name"] for each in own.tool_definitions()] == ["web_search"]
    plain = make(SortWords, "http://x/v1", tmp_path, enabled_toolsets=["web", "file"], disabled_toolsets=["browser"])
    assert plain.agent_tools.missing() == ["web", "browser"]
    assert "read_file" in {each["function"]["name"] for each in plain.tool_definitions()}
    with pytest.raises(ToolsetError, match="none of the toolsets web has tools here"):
        make(SortWords, "http://x/v1", tmp_path, enabled_toolsets=["web"]).tool_definitions()
    with pytest.raises(ToolsetError, match="unknown toolset or tool 'wep'"):
        make(SortWords, "http://x/v1", tmp_path, enabled_toolsets=["wep"]).tool_definitions()


async def test_what_sets_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"DOCKER_IMAGE": "alpine", "ENV": "local", "TIMEOUT": "7", "EMULATOR": "JediTerm"}.items():
        monkeypatch.setenv(f"TERMINAL_{name}", value)
    await process(SortWords, tmp_path, does_nothing, total_steps=1, tool_result_overrides={"terminl": 9, "terminal": 9})
    said = (tmp_path / "console.txt").read_text()
    assert "which settings replace: TERMINAL_DOCKER_IMAGE, TERMINAL_TIMEOUT; see" in said
    assert "names tools that do not exist: terminl" in said


async def test_the_model_and_the_record_have_the_same_preview_of_a_long_result(tmp_path: Path) -> None:
    seen: list[str] = []

    def reads_on(request: dict[str, Any]) -> Any:
        last = request["messages"][-1]
        if last["role"] != "tool":
            return call(("terminal", {"command": "seq 3000"}))
        seen.append(last["content"])
        if len(seen) == 1:
            path = last["content"].split("file ")[1].split(". It")[0]
            return call(("read_file", {"path": path, "limit": 5}))
        return say("Done.")

    limits = {"default_result_size_chars": 500, "preview_size_chars": 40, "tool_result_overrides": {"process": 9}}
    await process(SortWords, tmp_path, reads_on, total_steps=1, group_size=1, **limits)
    (group,) = lines(tmp_path / "groups.jsonl")
    written = [message["content"] for message in group["messages"][0] if message["role"] == "tool"]
    assert written == seen
    assert seen[0].startswith("<persisted-output>")
    assert "1\\n2\\n3" in seen[1] or "output" in seen[1]


async def test_reasoning_has_both_names_for_rewards_and_one_in_the_record(tmp_path: Path) -> None:
    shown: list[dict[str, Any]] = []

    class Reads(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            shown.extend(message for message in result.messages if message["role"] == "assistant")
            return 1.0

    await process(Reads, tmp_path, [say("Yes.", reasoning_content="Because.")], total_steps=1, group_size=1)
    assert [(m["reasoning"], m["reasoning_content"]) for m in shown] == [("Because.", "Because.")]
    (group,) = lines(tmp_path / "groups.jsonl")
    (message,) = [message for message in group["messages"][0] if message["role"] == "assistant"]
    assert message["reasoning"] == "Because." and "reasoning_content" not in message
    assert rollouts(tmp_path / "groups.jsonl")[0]["reward"] == 1.0


async def test_the_server_is_asked_for_before_a_run_without_an_error(tmp_path: Path) -> None:
    env = SortWords(SortWords.env_config_cls(), [ServerConfig(base_url="http://x/v1", server_type="vllm")])
    assert not hasattr(env, "server") and env._use_managed_server()
    with pytest.raises(RuntimeError, match="not started yet"):
        env.server  # noqa: B018
    async with ScriptedServer(sorts) as server:
        chat = make(SortWords, server, tmp_path)
        assert [each.config.model_name for each in chat.server.servers] == ["scripted"]
        assert not chat._use_managed_server()
        await chat.server.close()
