"""The command line of an environment: `serve | process | evaluate`, settings from flags, YAML and code.

Precedence: flags over YAML over `config_init()`. A name that no setting has is an error, never dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console

from backends.errors import ExitCode, LachesisError, SettingsError
from lachesis.authors import place
from lachesis.runs import own_process
from lachesis.runs.prose import print_prose
from lachesis.runs.run_folder import name_problem
from lachesis.settings.checked import (
    Problems,
    SettingsFile,
    read_yaml,
    reject_unknown,
    settings_error,
    validate_settings,
)
from lachesis.settings.chosen import as_env_config, chosen_values
from lachesis.settings.flags import make_parser, truth
from lachesis.settings.hooks import misspelt_hooks, require_hooks
from lachesis.settings.server_settings import ServerConfig, as_server_configs, describe, is_local_model, needs_start
from lachesis.settings.setting_facts import facts_of
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis.tracebacks import explained

if TYPE_CHECKING:
    from lachesis.runs.environment import Environment

TOP_LEVEL = ("env", "openai", "slurm", "testing", "agent")
OF_TRAINER = ("training", "tinker", "sft", "environments")
"""Sections of `launch_training.py`, which may be in the same file."""
_OF_AGENT = ("save_trajectories",)
"""Settings of the section `agent`."""


def main(
    env_cls: type[Environment],
    argv: Sequence[str] | None = None,
    *,
    prog: str | None = None,
    run: Callable[[Any], Awaitable[Any]] | None = None,
    short: Mapping[str, str] | None = None,
) -> int:
    """Run one command of an environment; the exit code. `prog`: see `make_parser`; `run`: called with the environment,
    in place of the command; `short`: by setting, the short flag that an error about it names."""
    from lachesis.runs.policy_servers import policy_server_at

    console = Console(emoji=False, stderr=True)
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        command, settings = read_settings(env_cls, arguments, prog=prog, ask=policy_server_at)
        note_misspelt_hooks(env_cls, console)
        begun = "" if prog else f"{env_cls.name or env_cls.__name__}: {command}, "  # `lachesis VERB ENV` has said it
        announce(begun, settings["server_configs"], console)
        env = env_cls(**settings)
        if problem := name_problem(env.run_name):
            raise SettingsError(
                f"the name of {env_cls.__name__}, {env.run_name!r}, {problem}; its runs are in data/NAME"
            )
        return own_process.run(_run(command, env, run))
    except Exception as error:
        setting = str(error).partition(":")[0]
        if isinstance(error, SettingsError) and short and setting in short:
            error = SettingsError(f"{short[setting]}: {error}")
        return report_error(error, console)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; finished work is saved: run the same command to continue")
        return ExitCode.STOPPED


def note_misspelt_hooks(env_cls: type[Environment], console: Console) -> None:
    """Report methods with nearly the name of one that a run calls."""
    for line in misspelt_hooks(env_cls):
        print_prose(console, f"note: {line}", style="yellow")


def announce(begun: str, servers: Sequence[ServerConfig], console: Console) -> None:
    """Tell a terminal at once what has begun, and with which model: the rest of the start takes a second."""
    if console.is_terminal:
        print_prose(console, f"{begun}model {describe(servers)}", style="dim")


def report_error(error: Exception, console: Console | None = None, *, kept: bool = True) -> int:
    """Print the error that ends a command; the exit code. An expected one is a message, any other has a traceback.

    Args:
        kept: whether what the command had finished is still there.
    """
    console = console or Console(emoji=False, stderr=True)
    said, rest = str(error), ""
    if not isinstance(error, LachesisError):
        from lachesis.likely_causes import guess

        said, _, rest = explained(error).partition("\n")
        where = place(error)
        if where or (isinstance(error, TypeError) and guess(error)):  # called with arguments that it does not take
            kept = kept and not where.endswith(".py")  # of an import: nothing has begun
            again = f"correct it and start again{'; finished work is kept' if kept else ''}"
            said, rest = f"{where}: {said}".removeprefix(": "), f"{rest}{again}"
        elif not isinstance(error, OSError):
            rest += "this is a bug in Lachesis; please report it with the lines above"
    console.print(f"error: {said}", style="red", markup=False, highlight=False, soft_wrap=True)
    if rest:
        console.print(rest, markup=False, highlight=False, soft_wrap=True)
    return error.exit_code if isinstance(error, LachesisError) else ExitCode.FAILED


async def _run(command: str, env: Environment, instead: Callable[[Any], Awaitable[Any]] | None) -> int:
    from lachesis.runs.results import print_result

    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    run = {"serve": env.env_manager, "process": env.process_manager, "evaluate": env._run_evaluate}[command]
    result: Any = await (run() if instead is None else instead(env))
    if not hasattr(result, "exit_code"):
        return 0  # of an environment with an evaluate() that returns something else
    print_result(Console(emoji=False), result)
    return int(result.exit_code)


def read_settings(
    env_cls: type[Environment],
    argv: Sequence[str],
    *,
    prog: str | None = None,
    ask: Callable[[str, str], Mapping[str, str]] | None = None,
) -> tuple[str, dict[str, Any]]:
    """The command, and the arguments of the environment's constructor. `prog`: see `make_parser`; `ask`: called with
    URL and key of a server of which nothing says how it is asked, as `policy_server_at`.

    Raises: SettingsError: names the setting, the problem, and the next step.
    """
    if env_cls._class_error is not None:
        raise env_cls._class_error
    require_hooks(env_cls)
    try:
        default_config, in_code = env_cls.config_init()
    except ValidationError as error:
        defaults = f"the defaults of {env_cls.__name__}"
        if error.title == env_cls.env_config_cls.__name__:
            raise settings_error(error, env_cls.env_config_cls, f"{defaults}: env") from error
        if error.title == ServerConfig.__name__:  # its model knows which values are secret
            raise settings_error(error, ServerConfig, f"{defaults}: openai") from error
        raise
    default_config = as_env_config(default_config, env_cls.env_config_cls)
    default_servers = as_server_configs(in_code)
    server = default_servers[0] if len(default_servers) == 1 else None
    given = vars(make_parser(env_cls.__doc__, default_config, server, prog).parse_args(argv))
    command = given.pop("command")
    path = given.pop("config", None)
    del given["parser"]
    flags = nest_flags(given)
    file, problems = read_yaml(Path(path)) if path else SettingsFile(), Problems()
    fields = type(default_config).model_fields
    elsewhere = {"env": fields, "openai": ServerConfig.model_fields}
    with problems.collected():
        places = file.places((), file)
        reject_unknown(f"{path}: ", file, (*TOP_LEVEL, *OF_TRAINER), places, elsewhere)

    from_file = dict[str, Any]()
    origins = dict[str, str]()
    for section in ("agent", "env"):  # `agent:` of Hermes Agent's file: `env:` wins over it
        with problems.collected():
            found = file.section(section)
            unknown = {name: found.pop(name) for name in [*found] if section == "agent" and name not in _OF_AGENT}
            from_file |= found
            origins |= file.places((section,), found, flags.get("env", {}))
            reject_unknown("agent.", unknown, _OF_AGENT, file.places((section,), unknown))
    env_values = {**chosen_values(default_config), **from_file, **flags.get("env", {})}
    with problems.collected():
        reject_unknown("env.", env_values, fields, origins, {"openai": ServerConfig.model_fields})
    config = default_config
    with problems.collected():
        known = {name: value for name, value in env_values.items() if name in fields}
        config = validate_settings(type(default_config), known, "env", origins)
        for name in fields:
            if (instead := facts_of(type(config), name).use_instead) and getattr(config, name):
                raise SettingsError(
                    f"{origins.get(name, '')}env.{name} is not translated for model servers; use {instead}"
                )
        if command == "process" and config.total_steps < 1:
            raise SettingsError(
                f"{origins.get('total_steps', '')}env.total_steps: -1 is the number of the trainer's steps, which only "
                "`serve` knows"
            )
    servers = list[ServerConfig]()
    with problems.collected():
        servers = _servers(
            default_servers,
            file,
            flags.get("openai", {}),
            of_env=fields,
            names_tokenizer="tokenizer_name" in {**from_file, **flags.get("env", {})},
            ask=ask,
        )
    options = dict[str, bool]()
    for name in ("slurm", "testing"):
        with problems.collected():
            try:
                options[name] = truth(str(flags.get(name, file.get(name) or False)))
            except ArgumentTypeError as error:
                raise SettingsError(f"{file.place(name)}{name}: {error}") from None
    problems.raise_all()
    _note_without_effect(command, default_config, file, flags)
    return command, {"config": config, "server_configs": servers, **options}


def _servers(
    defaults: list[ServerConfig],
    file: SettingsFile,
    from_flags: Mapping[str, Any],
    *,
    of_env: Iterable[str],
    names_tokenizer: bool,
    ask: Callable[[str, str], Mapping[str, str]] | None = None,
) -> list[ServerConfig]:
    """The servers: as many as the file or, without one, the code names; flags apply when it is one. `of_env`: names of
    settings of the environment, which somebody may have written here.

    A tokenizer that the code names is that of the code's models. Another model has its own, unless the file or a flag
    names one, as `openai.tokenizer_name` or (`names_tokenizer`) as `env.tokenizer_name`.
    """
    from_file = file.get("openai")
    entries = from_file if isinstance(from_file, list) else [from_file or {}]
    if not entries or not all(isinstance(entry, dict) for entry in entries):
        raise SettingsError(f"{file.place('openai')}openai: must be a mapping of server settings, or a list of them")
    if isinstance(from_file, list):
        layers: list[tuple[Mapping[str, Any], Mapping[str, Any]]] = [({}, entry) for entry in from_file]
    elif from_file and len(defaults) > 1:
        layers = [({}, from_file)]
    else:
        layers = [(default.model_dump(), from_file or {}) for default in defaults]
    if from_flags and len(layers) > 1:
        raise SettingsError(
            f"--openai.* flags do not say which of the {len(layers)} servers they are for; "
            "set the servers as a list under openai: in the YAML file instead"
        )
    servers = []
    own_models = {default.model_name for default in defaults}
    problems = Problems()
    for number, (base, chosen) in enumerate(layers):
        given = {**chosen, **from_flags}
        section = ("openai", number) if isinstance(from_file, list) else ("openai",)
        origins = file.places(section, chosen, from_flags)
        if ask is not None and "base_url" in given and not given.keys() & {"server_type", "engine"}:
            own = ask(str(given["base_url"] or ""), str(given.get("api_key") or ""))
            known = {*given, *(["tokenizer_name"] if names_tokenizer else [])}
            if told := {name: value for name, value in own.items() if name not in known}:
                chosen = {**chosen, **told}
                shown = ", ".join(f"{name} {value}" for name, value in told.items())
                text = f"{given['base_url']} is the policy server of a training run: {shown}"
                Console(emoji=False, stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
        values = {**base, **chosen, **from_flags}
        checked = list[ServerConfig]()
        with problems.collected():
            reject_unknown("openai.", values, ServerConfig.model_fields, origins, {"env": of_env})
        with problems.collected():
            values = {name: value for name, value in values.items() if name in ServerConfig.model_fields}
            checked = [validate_settings(ServerConfig, values, "openai", origins)]
        if not checked:
            continue
        (server,) = checked
        if server.model_name not in own_models and "tokenizer_name" not in {**chosen, **from_flags}:
            other = names_tokenizer or is_local_model(server)
            server.tokenizer_name = "none" if other else server.model_name
        given_url = "base_url" in from_flags or ("base_url" in chosen and "model_name" not in from_flags)
        with problems.collected():
            _check_url(server, origins.get("base_url", ""), given=given_url)
        servers.append(server)
    problems.raise_all()
    return servers


def _check_url(server: ServerConfig, origin: str, *, given: bool) -> None:
    """A URL that would not be used is an error. `origin`: its file; `given`: it is not a default."""
    url = server.base_url or ""
    if given and url and needs_start(server):
        raise SettingsError(
            f"{origin}openai.base_url is {url}, but openai.model_name is {server.model_name!r}, which runs here and "
            "needs no URL; name the server's model with --openai.model_name NAME, or leave base_url out"
        )


def _note_without_effect(
    command: str, in_code: HermesAgentEnvConfig, file: Mapping[str, Any], flags: Mapping[str, Any]
) -> None:
    """Name the settings that are accepted and change nothing."""
    ignored, of_training, of_serve = list[str](), list[str](), list[str]()
    of_trainer = any(file.get(section) for section in OF_TRAINER)
    removed = {f"env.{name}": None for name in in_code.model_fields_set if facts_of(type(in_code), name).removed}
    for namespace, model in (("env", type(in_code)), ("openai", ServerConfig)):
        in_file = file.get(namespace) or {}
        given = [*itertools.chain(*(in_file if isinstance(in_file, list) else [in_file])), *flags.get(namespace, {})]
        for name in dict.fromkeys(given):
            facts = facts_of(model, name)
            if facts.removed:
                removed[f"env.{name}"] = None
            elif (name == "batch_size" or facts.only_serve) and name not in flags.get(namespace, {}) and of_trainer:
                continue  # the trainer and `serve` read it in the same file
            elif facts.ignored:
                (of_training if name == "batch_size" else ignored).append(f"{namespace}.{name}")
            elif facts.only_serve and command != "serve":
                of_serve.append(f"{namespace}.{name}")
    if removed:
        from lachesis.settings.old_pools import read_settings as of_pools

        given_env = [found["env"] for found in (flags, file) if isinstance(found.get("env"), Mapping)]
        modes = (env.get("tool_pool_mode") for env in given_env)
        for name in of_pools(next(filter(None, modes), in_code.tool_pool_mode)):
            removed.pop(f"env.{name}", None)
    for names, note in (
        (ignored, "settings of Atropos that have no effect here"),
        ([*removed], "settings of the removed stack's pools of threads and sandboxes, which have no effect here"),
        (of_training, f"a setting of `lachesis train`, which `{command}` does not read"),
        (of_serve, f"settings of `serve`, which `{command}` does not read"),
    ):
        if names:
            text = f"note: {', '.join(names)}: {note}"
            Console(emoji=False, stderr=True).print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)


def nest_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """`{"env.name": value}` as `{"env": {"name": value}}`."""
    nested: dict[str, Any] = {}
    for name, value in flags.items():
        namespace, dot, field = name.partition(".")
        if dot:
            nested.setdefault(namespace, {})[field] = value
        else:
            nested[name] = value
    return nested
