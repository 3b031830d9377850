"""The command line of an environment: `serve | process | evaluate`, settings from flags, YAML and code.

Precedence: flags over YAML over `config_init()`. A name that no setting has is an error, never dropped.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import signal
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from backends import BackendError
from environments.atropos import APIServerConfig, as_server_configs
from environments.config import HermesAgentEnvConfig
from environments.dataset_rows import DatasetError
from environments.items import ItemError
from environments.ledger import RunFolderError
from environments.process import RunResult, RunStopped
from environments.servers import Phase1CannotTrain, ServerConfig, ServerConfigError
from environments.tracking import TrackingError
from inference import InferenceError
from inference.embedded import EmbeddedServerError
from tools import ToolsetError, ToolUnavailable
from trajectories import JsonlError

if TYPE_CHECKING:
    from environments.hermes_base_env import HermesAgentBaseEnv

COMMANDS = {
    "serve": "send rollouts to a trainer",
    "process": "play total_steps groups and write trajectories",
    "evaluate": "measure the model",
}
TOP_LEVEL = ("env", "openai", "slurm", "testing")

Model = TypeVar("Model", bound=BaseModel)


class SettingsError(ValueError):
    """Settings that cannot be used."""


EXPECTED_ERRORS = (
    BackendError,
    DatasetError,
    EmbeddedServerError,
    InferenceError,
    ItemError,
    JsonlError,
    Phase1CannotTrain,
    RunFolderError,
    RunStopped,
    ServerConfigError,
    SettingsError,
    ToolUnavailable,
    ToolsetError,
    TrackingError,
)
"""Errors that say everything there is to know; a traceback would only hide it."""

USAGE_ERRORS = (Phase1CannotTrain, ServerConfigError, SettingsError, ToolUnavailable, ToolsetError)
"""Of these, what another command line mends: exit code 2."""


def main(env_cls: type[HermesAgentBaseEnv], argv: Sequence[str] | None = None) -> int:
    """Run one command of an environment; the exit code."""
    console = Console(stderr=True)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command, env = build(env_cls, arguments)
        return asyncio.run(_run(command, env))
    except EXPECTED_ERRORS as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, USAGE_ERRORS) else 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; what was finished is kept, start again to continue")
        return 130


async def _run(command: str, env: HermesAgentBaseEnv) -> int:
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    if command == "serve":
        await env.env_manager()
        return 0
    result = await (env.process_manager() if command == "process" else env._run_evaluate())
    if not isinstance(result, RunResult):
        return 0  # an evaluate() of the environment's own
    print_result(Console(), result)
    return 1 if result.failed_groups or result.exceptions else 0


def build(env_cls: type[HermesAgentBaseEnv], argv: Sequence[str]) -> tuple[str, HermesAgentBaseEnv]:
    """The command and the environment that the arguments ask for.

    Raises:
        SettingsError: names what is wrong with which setting.
    """
    default_config, default_servers = env_cls.config_init()
    parser = _parser(env_cls, type(default_config))
    given = vars(parser.parse_args(argv))
    command = given.pop("command")
    path = given.pop("config", None)
    flags = _nest(given)
    file = _read_yaml(Path(path)) if path else {}
    _reject_unknown(f"{path}: ", file, TOP_LEVEL)

    from_file = file.get("env") or {}
    if not isinstance(from_file, dict):
        raise SettingsError(f"{path}: env: has to hold settings by name, not a {type(from_file).__name__}")
    env_values = {**default_config.model_dump(), **from_file, **flags.get("env", {})}
    _reject_unknown("env.", env_values, type(default_config).model_fields)
    config = _validate(type(default_config), env_values, "env")
    servers = _servers(as_server_configs(default_servers), file.get("openai"), flags.get("openai", {}))
    options = {name: bool(flags.get(name, file.get(name, False))) for name in ("slurm", "testing")}
    return command, env_cls(config=config, server_configs=servers, **options)


def _servers(defaults: list[APIServerConfig], from_file: Any, from_flags: Mapping[str, Any]) -> list[APIServerConfig]:
    """The servers: as many as the file or, without one, the code names; flags apply when it is one."""
    entries = from_file if isinstance(from_file, list) else [from_file or {}]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError("openai: has to hold the settings of a server by name, or a list of such servers")
    if isinstance(from_file, list):
        layers: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [({}, entry) for entry in from_file]
    elif from_file and len(defaults) > 1:
        layers = [({}, from_file)]
    else:
        layers = [(default.model_dump(), from_file or {}) for default in defaults]
    if from_flags and len(layers) > 1:
        raise SettingsError(
            f"--openai.* flags say nothing about which of the {len(layers)} servers they mean; "
            "set the servers as a list under openai: in the YAML file instead"
        )
    servers: list[APIServerConfig] = []
    for base, chosen in layers:
        values = {**base, **chosen, **from_flags}
        _reject_unknown("openai.", values, ServerConfig.model_fields)
        servers.append(_validate(ServerConfig, values, "openai"))
    return servers


def _parser(env_cls: type[HermesAgentBaseEnv], config_cls: type[HermesAgentEnvConfig]) -> argparse.ArgumentParser:
    """One flag a setting; all of them text here, typed by pydantic later."""
    parser = argparse.ArgumentParser(description=env_cls.__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{serve,process,evaluate}")
    for command, help_text in COMMANDS.items():
        sub = commands.add_parser(command, help=help_text, description=help_text, allow_abbrev=False)
        sub.add_argument("--config", metavar="FILE", help="YAML file with env: and openai: (flags win over it)")
        sub.add_argument("--slurm", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        sub.add_argument(
            "--testing", action="store_true", default=argparse.SUPPRESS, help="skip the check of the servers"
        )
        for namespace, model in (("env", config_cls), ("openai", ServerConfig)):
            group = sub.add_argument_group(namespace)
            for name, field in model.model_fields.items():
                shown = "" if field.default is None else f" (default: {field.get_default(call_default_factory=True)})"
                group.add_argument(
                    f"--{namespace}.{name}",
                    type=_typed(field.annotation),
                    default=argparse.SUPPRESS,
                    metavar="VALUE",
                    help=f"{field.description or ''}{shown}".replace("%", "%%"),
                    **_optional_value(field.annotation),
                )
    return parser


def _optional_value(annotation: Any) -> dict[str, Any]:
    """A switch may be given without a value."""
    return {"nargs": "?", "const": True} if _accepts(annotation, bool) else {}


def _typed(annotation: Any) -> Any:
    """How the text of a flag becomes a value: text stays text, everything else is read as YAML (so JSON works too)."""
    if _accepts(annotation, str):
        return (lambda text: None if text in ("null", "None") else text) if _accepts(annotation, type(None)) else str
    return _from_yaml


def _from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not YAML: {' '.join(str(error).split())}") from error


def _accepts(annotation: Any, kind: type) -> bool:
    if get_origin(annotation) in (Union, types.UnionType):
        return any(_accepts(part, kind) for part in get_args(annotation))
    return annotation is kind


def _nest(flags: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in flags.items():
        namespace, dot, field = name.partition(".")
        if dot:
            nested.setdefault(namespace, {})[field] = value
        else:
            nested[name] = value
    return nested


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read the settings file {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingsError(f"{path} has to hold settings under env: and openai:, not a {type(content).__name__}")
    return content


def _reject_unknown(prefix: str, given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; known are {', '.join(known)}"
            raise SettingsError(f"unknown setting {prefix}{name}{hint}")


def _validate(model: type[Model], values: Mapping[str, Any], namespace: str) -> Model:
    try:
        return model(**values)
    except ValidationError as error:
        lines = [
            f"{namespace}.{'.'.join(map(str, problem['loc']))}: {problem['msg']} (got {problem['input']!r})"
            if problem["loc"]
            else f"{namespace}: {problem['msg']}"
            for problem in error.errors()
        ]
        raise SettingsError("\n       ".join(lines)) from error


def print_result(console: Console, result: RunResult) -> None:
    """The table that a run ends with, and where everything is."""
    summary = result.summary
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    left_out = summary.rollouts - summary.scored
    table.add_row(
        "items", f"{summary.items}" + (f" ({result.played} in this run)" if result.played != summary.items else "")
    )
    table.add_row("rollouts", f"{summary.rollouts}" + (f", {left_out} left out" if left_out else ""))
    table.add_row("mean reward", f"{summary.reward}" if summary.scored else "none was scored")
    table.add_row("turns", f"{summary.turns:.2f} a rollout")
    table.add_row("tool calls", f"{summary.tool_calls:.2f} a rollout, {summary.tool_errors:.2f} failed")
    table.add_row("outcomes", ", ".join(f"{name} {count}" for name, count in summary.outcomes.items()) or "none")
    if summary.discarded:
        table.add_row("rolled back", f"{summary.discarded} completions")
    for name, value in summary.metrics.items():
        table.add_row(name.replace("_", " "), f"{value:.3f}")
    if summary.uncounted_requests:
        table.add_row("tokens/s", "the server does not count tokens")
    else:
        table.add_row(
            "tokens/s", f"{result.tokens / max(result.seconds, 1e-9):.0f} ({result.tokens} in {result.seconds:.1f} s)"
        )
    console.print(table)
    for label, where in (
        ("groups", str(result.files.groups)),
        ("trajectories", f"{result.files.samples}, {result.files.failed_samples.name}"),
        ("report", str(result.files.report)),
    ):
        # Outside of the table: a path that is cut or wrapped cannot be copied.
        console.print(f"[bold]{label:<13}[/bold] {escape(where)}", highlight=False, soft_wrap=True)
    if result.failed_groups:
        console.print(f"{result.failed_groups} groups had no scored rollout; start again to play them", style="yellow")
    if result.exceptions:
        console.print(
            f"{result.exceptions} rollouts ended in an exception of the environment; see the report", style="red"
        )
