"""`launch_training.py` and `lachesis train --sft`: train a model on the batches of a rollout API, and serve it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel
from rich.console import Console

from backends.errors import ExitCode, SettingsError, cannot_read
from lachesis.runs.command_line import OF_TRAINER, TOP_LEVEL, nest_flags, report_error
from lachesis.runs.own_process import run
from lachesis.settings.checked import Problems, SettingsFile, read_yaml, reject_unknown, validate_settings
from lachesis.settings.flags import Parser, add_flags, close_names
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client.urls import http_url
from lachesis_train.rollout_api import TOKEN_VARIABLE
from lachesis_train.sft.settings import SftSettings
from lachesis_train.trainer.environments import read_environments
from lachesis_train.trainer.forecast import check_memory
from lachesis_train.trainer.settings import TREES_MASKED, EnvSettings, Settings, TrainingSettings
from lachesis_train.verbs.training_parts import LazyTokenizer, engine, new_recorder, serving, stop_at_signals

Checked = TypeVar("Checked", bound=BaseModel)

EXAMPLE: Final = Path(__file__).parents[4] / "configs" / "train_tool_call.yaml"
"""The settings of a start without any; a wheel has none."""


def main(argv: Sequence[str] | None = None, *, prog: str = "launch_training.py") -> int:
    """Run the trainer; the exit code."""
    console = Console(emoji=False, stderr=True)
    names = [text.partition("=")[0] for text in (sys.argv[1:] if argv is None else argv)]
    parser = make_parser(prog, of_files="--sft" in names)
    given = vars(parser.parse_args(argv))
    try:
        config, resume = given.pop("config", None), given.pop("resume")
        files, serve = given.pop("sft", None), given.pop("serve")
        path, flags = Path(config) if config else None, nest_flags(given)
        if path is None and not flags and not files and EXAMPLE.is_file():
            path = EXAMPLE
            text = f"no settings are given: the model of {EXAMPLE} is trained, with the settings of that file"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        settings = read_settings(path, flags, of_files=bool(files))
        for missing in (file for file in files or () if not Path(file).exists()):
            raise SettingsError(f"{cannot_read(missing)}; name trajectories with --sft")
        check_packages()
        if files:
            from lachesis_train.verbs.sft_training import train_on_files

            return run(train_on_files(settings, read_sft(path, flags), files, console, resume=resume, serve=serve))
        check_memory(settings)
        return run(train(settings, read_sft(path, flags), console, resume=resume))
    except Exception as error:
        return report_error(error, console)
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print("stopped; start the same command again to continue from the last checkpoint")
        return ExitCode.STOPPED


def make_parser(prog: str = "launch_training.py", *, of_files: bool = False) -> argparse.ArgumentParser:
    """One flag a setting. Where two sections have a setting, the first one is proposed for a flag without a section:
    `of_files` says that this is `sft` before `env`."""
    parser = Parser(
        prog=prog,
        description="Train a model on the batches of a rollout API, and serve it.",
        usage="%(prog)s [--config FILE] [--training.NAME VALUE ...] [--env.NAME VALUE ...]",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with training:, env: and openai: (flags win over it)"
    )
    parser.add_argument(
        "--sft", nargs="+", metavar="FILE", help="train on these files of `process`, without a rollout API"
    )
    parser.add_argument("--serve", action="store_true", help="with --sft: serve the trained weights until Ctrl-C")
    parser.add_argument("--resume", action="store_true", help="fail if the run has no checkpoint to continue from")
    shared: list[tuple[str, type[BaseModel], str]] = [
        ("env", EnvSettings, "settings shared with the environment (env: in YAML)"),
        ("sft", SftSettings, "settings of a run on files (sft: in YAML)"),
    ]
    of_training = ("training", TrainingSettings, "settings of the trainer (training: in YAML)")
    for namespace, model, title in (of_training, *(reversed(shared) if of_files else shared)):
        add_flags(parser.add_argument_group(title), namespace, model)
    group = parser.add_argument_group("the model server that environments ask (openai: in YAML)")
    group.add_argument("--openai.model_name", default=argparse.SUPPRESS, metavar="TEXT", help="Name of the model.")
    group.add_argument("--openai.base_url", default=argparse.SUPPRESS, metavar="TEXT", help="Its port is served.")
    return parser


def read_sft(path: Path | None, flags: Mapping[str, Any]) -> SftSettings:
    """The section `sft:` of a file, and flags, which win. Raises SettingsError."""
    return _checked(SftSettings, "sft", read_yaml(path) if path else SettingsFile(), flags)


def read_settings(path: Path | None, flags: Mapping[str, Any], *, of_files: bool = False) -> Settings:
    """The settings of a file and of flags, which win. `of_files`: these say how many steps there are.

    Raises: SettingsError: names the setting, the problem, and the next step.
    """
    file, problems = read_yaml(path) if path else SettingsFile(), Problems()
    models: dict[str, type[BaseModel]]
    models = {"training": TrainingSettings, "env": HermesAgentEnvConfig, "openai": ServerConfig, "sft": SftSettings}
    elsewhere = {name: model.model_fields for name, model in models.items()}
    with problems.collected():
        reject_unknown(f"{path}: ", file, (*TOP_LEVEL, *OF_TRAINER), file.places((), file), elsewhere)
    if "tinker" in file and "training" in file:
        raise SettingsError(f"{file.place('tinker')}tinker: and training: are the same section; keep one of them")
    with problems.collected():
        env = file.section("env")
        _check_env(env, file.places(("env",), env))
    with problems.collected():
        _check_env(flags.get("env", {}))
    openai = file.get("openai") or {}
    server = {**(openai[0] if isinstance(openai, list) else openai), **flags.get("openai", {})}
    with problems.collected():
        url = _url("openai.base_url", server.get("base_url"))
    with problems.collected():
        of_training = _checked(TrainingSettings, "tinker" if "tinker" in file else "training", file, flags)
    with problems.collected():
        of_env = _checked(EnvSettings, "env", file, flags, others=True)
    problems.raise_all()
    _url("training.teacher_url", of_training.teacher_url)
    if of_env.tree_at and of_training.mask_truncated_completions:
        raise SettingsError(f"env.tree_at: rollouts would branch, and {TREES_MASKED}")
    model = of_training.base_model or server.get("model_name")
    missing = [] if model else ["no model to train: set --training.base_model, or openai.model_name"]
    steps = of_training.num_steps or (of_env.total_steps if of_env.total_steps > 0 else None)
    if steps is None and not of_files:
        missing.append("the number of steps is unknown: set --training.num_steps")
    if missing:
        raise SettingsError("; ".join(missing))
    if of_env.sequences % of_env.group_size:
        raise SettingsError(
            f"env.batch_size {of_env.sequences} is not a multiple of env.group_size {of_env.group_size}: a batch holds "
            "whole groups"
        )
    port = of_training.port
    settings = Settings(
        env=of_env,
        training=of_training,
        served_model=str(server.get("model_name") or model),
        base_model=str(model),
        tokenizer=of_env.tokenizer_name or server.get("tokenizer_name"),
        port=(urlsplit(url).port or 8001) if port is None else port,
        num_steps=steps or 0,
        environments=read_environments(file.get("environments") or []),
    )
    for each in settings.environments:
        settings.of_environment(each.name)
        if each.training.get("warm_start") and "warm_start" not in of_training.model_fields_set:
            raise SettingsError(
                f"environments: {each.name}: training.warm_start replaces that of the run, which has none: set "
                "training.warm_start, the items of each other environment (--warm-start N)"
            )
    return settings


def _url(name: str, given: Any) -> str:
    try:
        return http_url(str(given or "")) or ""
    except ValueError as error:
        raise SettingsError(f"{name}: {error} (got {given!r})") from None


def _checked(
    model: type[Checked], section: str, file: SettingsFile, flags: Mapping[str, Any], *, others: bool = False
) -> Checked:
    """The settings of a section and of its flags, which win. `others`: it may have settings of other models too."""
    in_file, namespace, problems = file.section(section), "training" if section == "tinker" else section, Problems()
    in_flags = flags.get(namespace, {})
    origins = file.places((section,), in_file, in_flags)
    values = {**in_file, **in_flags}
    if not others:
        with problems.collected():
            reject_unknown(f"{namespace}.", in_file, model.model_fields, origins)
        values = {name: value for name, value in values.items() if name in model.model_fields}
    with problems.collected():
        settings = validate_settings(model, values, namespace, origins)
    problems.raise_all()
    return settings


def _check_env(env: Mapping[str, Any], origins: Mapping[str, str] = {}) -> None:
    """Names that only an environment knows are its own; those that are nearly one of ours are mistakes."""
    known = {*EnvSettings.model_fields, *HermesAgentEnvConfig.model_fields}
    near = [name for name in env if name not in known and close_names(str(name), EnvSettings.model_fields)]
    reject_unknown("env.", near, EnvSettings.model_fields, origins)


def check_packages() -> None:
    """Raises SettingsError if a package is missing that the engine of the run needs, or its URL is none."""
    from lachesis_train.tinker_sdk import is_configured

    _url("TINKER_BASE_URL", os.environ.get("TINKER_BASE_URL"))
    needed = ("tinker", "transformers") if is_configured() else ("tinker", "transformers", "torch", "peft")
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise SettingsError(
            f'training needs {", ".join(missing)}: pip install "lachesis-rl[torch]". In a checkout: make train-venv, '
            "then . .venv-train/bin/activate"
        )


async def train(settings: Settings, sft: SftSettings, console: Console, *, resume: bool) -> int:
    """Train with these settings; the exit code: 0 once all steps are in the weights."""
    from lachesis_train.trainer.batches import BatchSource
    from lachesis_train.trainer.checkpoints import Checkpoint, alone_in
    from lachesis_train.trainer.loop import Trainer

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    folder, stop = settings.run_dir, asyncio.Event()
    source = BatchSource(
        settings.env.rollout_server_url,
        settings.registration,
        folder / "batches",
        token=os.environ.get(TOKEN_VARIABLE),
        end_without_environments=settings.training.end_without_environments,
        say=say,
    )
    tokenizer = LazyTokenizer(settings)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(alone_in(folder))
        link = await stack.enter_async_context(engine(settings))
        stop_at_signals(stop, say)
        if settings.training.warm_start and Checkpoint.read(folder) is None and not resume:
            from lachesis_train.verbs.sft_training import warm_start

            if not await warm_start(settings, sft, link, tokenizer, console, stop):
                return ExitCode.STOPPED
        teacher = None
        if (url := settings.training.teacher_url) is not None:
            from lachesis_train.trainer.teacher import Teacher

            model = settings.training.teacher_model or settings.base_model
            teacher = Teacher(url, model, await asyncio.to_thread(tokenizer.get), say=say)
            stack.push_async_callback(teacher.close)
        trainer = Trainer(
            settings,
            link,
            source,
            recorder=lambda first: new_recorder(settings, first, tokenizer, console),
            serving=lambda policy: serving(settings, policy, tokenizer, say),
            teacher=teacher,
            resume=resume,
            say=say,
            stop=stop,
        )
        steps = await trainer.run()
    say(f"{steps} of {settings.num_steps} steps are in the weights; checkpoint, metrics and report are in {folder}")
    return 0 if steps >= settings.num_steps else ExitCode.STOPPED


if __name__ == "__main__":
    sys.exit(main())
