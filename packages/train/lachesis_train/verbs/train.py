"""`lachesis train`: one command for the rollout API, the trainer and the environments of a training run.

All read the same file and flags. What dies is started again; Ctrl-C ends the run, and the same command continues it.
Logs, checkpoints and report.html are in the run's folder. With --sft FILE it trains on files of `process` instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.text import Text

from backends.errors import ExitCode, SettingsError
from lachesis.cli.environment_classes import environment_class
from lachesis.cli.verb_parser import ENVIRONMENT, VerbParser
from lachesis.runs import command_line
from lachesis.runs.results import program
from lachesis.settings.checked import read_yaml
from lachesis.settings.flags import GROUPS, add_flags
from lachesis.settings.server_settings import ServerConfig
from lachesis.settings.setting_facts import facts_of
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.processes.ports import free_ports
from lachesis_train.processes.process import Part
from lachesis_train.processes.supervisor import Supervisor
from lachesis_train.sft.settings import SftSettings
from lachesis_train.trainer.checkpoints import FILE as CHECKPOINT
from lachesis_train.trainer.environments import RunEnvironment, chosen_environments
from lachesis_train.trainer.forecast import check_memory
from lachesis_train.trainer.next_commands import next_commands, write_commands
from lachesis_train.trainer.settings import EnvSettings, Settings, TrainingSettings
from lachesis_train.verbs import launch_training

_EPILOG: Final = """\
`lachesis train --help-all` lists all settings (--training.NAME, --env.NAME, --openai.NAME, --sft.NAME);
`lachesis serve ENV --help-all` those of an environment too.
"""
COLOURS: Final = {"api": "cyan", "trainer": "green", "lachesis": "bold"}
OF_SERVE: Final = ("env.spool_path", "env.data_dir_to_save_evals", "env.wandb_name", "env.min_batch_allocation")
"""Settings that `process` does not read."""
OF_BOTH: Final = ("model_name", "base_url")
"""Flags `--openai.NAME` that the trainer reads too."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train until the trainer has made its steps; the exit code."""
    names = {text.partition("=")[0] for text in argv or ()}
    if "--help-all" in names:
        _parser(help_all=True).print_help()
        return ExitCode.DONE
    if "--sft" in names:
        return launch_training.main(argv, prog="lachesis train")
    if "--rehearse" in names:
        return _rehearse(argv)
    if {"-h", "--help"} & names:
        _parser(help_all=False).print_help()
        return ExitCode.DONE
    given, plan = planned(argv)
    console = Console(emoji=False, highlight=False)
    for examples in plan.examples:
        if code := subprocess.run(examples, check=False).returncode:
            return code
    write_commands(plan.settings.run_dir, plan.commands)
    code = asyncio.run(_run(plan, given.max_restarts, console))
    show_end(console, code, plan.settings.run_dir, plan.commands)
    return code


def show_end(console: Console, code: int, folder: Path, commands: Sequence[tuple[str, str]]) -> None:
    """How a run ended, its files and, of a finished one, what to do next, as at the end of `process`."""
    ends: dict[int, str] = {ExitCode.DONE: "trained", ExitCode.STOPPED: "stopped; the same command continues"}
    report = folder / "report.html"
    rows = [
        ("run", ends.get(code, f"ended before the last step, exit code {code}")),
        ("report", str(report) if report.exists() else "none yet"),
        ("logs", str(folder / "logs")),
    ]
    for number, (command, does) in enumerate(commands if code == ExitCode.DONE else ()):
        rows.append(("" if number else "next", f"{program()} {command}   ({does})"))
    for name, text in rows:
        console.print(f"{name:<8}{text}", markup=False, soft_wrap=True)


def _rehearse(argv: Sequence[str] | None) -> int:
    """Check the settings as for a run, and play it in virtual time; the exit code."""
    from lachesis_train.verbs import rehearse  # a run starts without it

    given, flags = rehearse.rehearsal_parser().parse_known_args(argv)
    chosen, config = _by_setting(flags), ["--config", given.config] if given.config else []
    missing = {"openai.server_type": "vllm", "openai.model_name": "rehearsed", "training.num_steps": "40"}
    for name, value in missing.items():
        if _in_file(given.config, name) is None:
            chosen.setdefault(name, [value])
    settings = _trainer_settings(config, chosen)
    of_serve = _check_environment(given.env, config, {**chosen, "env.total_steps": ["-1"]})
    plan = rehearse.rehearsal_plan(given, of_serve["config"], settings)
    rehearse.show_rehearsal(plan, Console(emoji=False, highlight=False), as_json=given.json)
    return ExitCode.DONE


def planned(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, TrainingPlan]:
    """The arguments, and what they start.

    Raises:
        SettingsError: for settings that one of the processes would refuse.
    """
    given, flags = _parser().parse_known_args(argv)
    groups = _by_setting(flags)
    if given.warm_start is not None:
        groups["training.warm_start"] = [str(given.warm_start)]
    return given, TrainingPlan.of(given, groups)


async def _run(plan: TrainingPlan, max_restarts: int, console: Console) -> int:
    def say(name: str, line: str) -> None:
        console.print(
            Text(f"{name:<11} ", style=COLOURS.get(name, "magenta")).append(Text.from_ansi(line, style="default")),
            soft_wrap=True,
        )

    plan.say = lambda line: say("lachesis", line)

    supervisor = Supervisor(
        plan.parts,
        main="trainer",
        logs=plan.settings.run_dir / "logs",
        say=say,
        max_restarts=max_restarts,
        finished=plan.why_it_cannot_go_on,
    )
    return await supervisor.run()


class TrainingPlan:
    """The processes of a run, with the settings checked before any of them starts."""

    def __init__(
        self,
        settings: Settings,
        parts: list[Part],
        playing: set[str],
        api: str,
        examples: Sequence[Sequence[str]] = (),
        commands: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.settings = settings
        self.parts = parts
        self.playing = playing
        """The parts that are environments and have not ended by themselves."""
        self.api = api
        self.examples = examples
        """The commands with which reference policies play the examples of the warm start, where they are needed."""
        self.commands = commands
        """Those with which one goes on afterwards: `next_commands`."""
        self.say: Callable[[str], object] = print

    @classmethod
    def of(cls, given: argparse.Namespace, flags: Mapping[str, Sequence[str]]) -> TrainingPlan:
        """Raises `SettingsError` for settings that one of the processes would refuse."""
        config = ["--config", given.config] if given.config else []
        if not config:  # a file may have names of its own
            for target in given.env or ():
                environment_class(target)
        api_port, policy_port = free_ports(2)
        added = {
            "env.rollout_server_url": f"http://127.0.0.1:{api_port}",
            "openai.base_url": f"http://127.0.0.1:{policy_port}/v1",
        }
        chosen = dict(flags)
        for name, value in added.items():
            chosen.setdefault(name, [value])
        settings = _trainer_settings(config, chosen)
        launch_training.check_packages()
        check_memory(settings)
        if settings.tokenizer is None:
            chosen["env.tokenizer_name"] = [settings.base_model]
        folder = settings.run_dir.absolute()
        for name, value in {
            "openai.server_type": "vllm",
            "openai.model_name": settings.served_model,
            "env.total_steps": "-1",  # as many as the trainer makes
            "env.spool_path": str(folder / "spool"),
            **({"env.ensure_scores_are_not_same": "false"} if settings.training.teacher_url else {}),
            "env.include_messages": "true",  # what the viewer shows of a step
            "env.data_dir_to_save_evals": str(folder / "eval"),
        }.items():
            if (of_file := _in_file(given.config, name)) is None:
                chosen.setdefault(name, [value])
            elif name in OF_SERVE:
                chosen.setdefault(name, [str(of_file)])
        environments = chosen_environments(settings.environments, given.env or ())
        if not environments:
            raise SettingsError("no environment to train on: name one with --env, or under environments: in the file")
        several = len(given.env or ()) != 1 or bool(settings.environments)
        own = partial(_own_flags, environments=environments, chosen=chosen, given=flags)
        flags_of = {each.name: own(each) if several else chosen for each in environments}
        for each in environments:
            _check_environment(each.env, config, flags_of[each.name])
        url = settings.env.rollout_server_url
        policy = f"http://{settings.training.host}:{settings.port}"
        api = _api(given.rollout_api, url, folder, len(environments))
        python = (sys.executable, "-m")
        trainer = Part(
            "trainer",
            [*python, "lachesis_train.verbs.launch_training", *config, *_flags(chosen, of_trainer)],
            probe=f"{policy}/health",
            grace=300.0,  # it finishes the step that it is at, and saves it
        )
        parts, examples = [], []
        for each in environments:
            of_it, place = flags_of[each.name], each.name if several else ""
            module = [*python, "lachesis_train.verbs.train_environment", each.env, "serve"]
            command = [*module, *config, *_flags(of_it, of_environment)]
            parts.append(Part(place or "environment", command, grace=90.0))
            items = each.training.get("warm_start", settings.training.warm_start)
            if items and settings.training.warm_start and not (folder / CHECKPOINT).exists():
                of_play = {
                    name: values for name, values in of_it.items() if name not in OF_SERVE and not _only_serve(name)
                } | {
                    "env.total_steps": [str(items)],
                    "env.group_size": ["1"],
                    "env.tree_at": ["null"],
                    "env.data_path_to_save_groups": [str(settings.warm_start_dir / place / "groups.jsonl")],
                }
                module = [*python, "lachesis_train.verbs.warm_start", each.env, "process"]
                examples.append([*module, *config, *_flags(of_play, of_environment)])
        commands = next_commands(settings, environments, flags_of, config)
        return cls(settings, [*api, trainer, *parts], {part.name for part in parts}, url, examples, commands)

    async def why_it_cannot_go_on(self, name: str) -> str | None:
        """Wait until the trainer has all batches that it wants without the part that has ended; why not, otherwise."""
        if name not in self.playing:
            return f"{name} has ended on its own"
        self.playing.remove(name)
        wanted, size = self.settings.num_steps, self.settings.env.sequences
        async with aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError):  # it is being started again
                    async with session.get(f"{self.api}/status") as answer:
                        status = await answer.json(content_type=None)
                    if status["current_step"] >= wanted:
                        return None
                    if self.playing:
                        others = " and ".join(sorted(self.playing))
                        self.say(
                            f"{name} has ended on its own (its last line says why); the run continues with {others}"
                        )
                        return None
                    if status.get("sequences", status["queue_size"] * self.settings.env.group_size) < size:
                        return (
                            f"{'the environment' if name == 'environment' else name} has ended on its own (its last "
                            "line says why), and the trainer has received "
                            f"{status['current_step']} of {wanted} batches; their steps are in a checkpoint. To go on, "
                            "give it more items, or ones that are neither solved nor too hard, and start the same "
                            "command again; or lower --training.num_steps"
                        )
                await asyncio.sleep(1.0)


def of_trainer(name: str) -> bool:
    """Whether the trainer reads a setting."""
    section, _, field = name.partition(".")
    if section == "env":
        return field in EnvSettings.model_fields
    return section in ("training", "sft") or (section == "openai" and field in OF_BOTH)


def _only_serve(name: str) -> bool:
    section, _, field = name.partition(".")
    known = section == "env" and field in HermesAgentEnvConfig.model_fields
    return known and facts_of(HermesAgentEnvConfig, field).only_serve


def of_environment(name: str) -> bool:
    """Whether the environment reads a setting."""
    return not name.startswith(("training.", "sft."))


def _api(kind: str, url: str, folder: Path, environments: int) -> list[Part]:
    """The rollout API as a part; none where one runs already."""
    port = url.rpartition(":")[2].strip("/")
    if kind == "running":
        return []
    if kind == "stock":
        command = [sys.executable, "-m", "uvicorn", "atroposlib.api:app", "--port", port, "--log-level", "warning"]
        return [Part("api", command, probe=f"{url}/info")]
    command = [sys.executable, "-m", "lachesis", "api", "--port", port, "--db", str(folder / "api.db")]
    command += ["--environments", str(environments)]
    return [Part("api", command, probe=f"{url}/info")]


def _trainer_settings(config: Sequence[str], chosen: Mapping[str, Sequence[str]]) -> Settings:
    parsed = vars(launch_training.make_parser().parse_args([*config, *_flags(chosen, of_trainer)]))
    path = parsed.pop("config", None)
    for name in ("resume", "sft", "serve"):
        del parsed[name]
    return launch_training.read_settings(Path(path) if path else None, command_line.nest_flags(parsed))


def _check_environment(target: str, config: Sequence[str], chosen: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    env_cls = environment_class(target)
    notes = io.StringIO()
    try:
        with contextlib.redirect_stderr(notes):  # its own process repeats them
            return command_line.read_settings(
                env_cls, ["serve", *config, *_flags(chosen, of_environment)], prog="lachesis train"
            )[1]
    except SystemExit:
        sys.stderr.write(notes.getvalue())
        raise


def _own_flags(
    environment: RunEnvironment,
    environments: Sequence[RunEnvironment],
    chosen: Mapping[str, Sequence[str]],
    given: Mapping[str, Sequence[str]],
) -> dict[str, Sequence[str]]:
    """The flags of one of several environments: those of all, its entry, which those of the command line win over, and
    what it cannot share."""
    settings, name = environment.settings.items(), environment.name
    own = {f"env.{key}": [value if isinstance(value, str) else json.dumps(value)] for key, value in settings}
    folders = {key: [str(Path(chosen[key][0]) / name)] for key in ("env.spool_path", "env.data_dir_to_save_evals")}
    share = environment.weight / sum(each.weight for each in environments)
    of_share = {"env.min_batch_allocation": [repr(share)]} if share < 1 else {}
    return {**chosen, **own, **given, **folders, "env.wandb_name": [name], **of_share}


def _in_file(config: str | None, name: str) -> Any:
    """The value of a setting in the file; None where it has none."""
    section, _, field = name.partition(".")
    file: dict[str, Any] = read_yaml(Path(config)) if config else {}
    found = file.get(section) or {}
    entries = found if isinstance(found, list) else [found]
    return next((entry[field] for entry in entries if isinstance(entry, dict) and field in entry), None)


def _by_setting(flags: Sequence[str]) -> dict[str, list[str]]:
    """Flags `--section.name value` by `section.name`.

    Raises:
        SettingsError: an argument that belongs to none.
    """
    found: dict[str, list[str]] = {}
    name = None
    for text in flags:
        if text.startswith("--"):
            name, equals, value = text[2:].partition("=")
            if name.partition(".")[0] not in ("env", "openai", "training", "sft") or "." not in name:
                raise SettingsError(
                    f"unknown option --{name}; settings are --training.NAME, --env.NAME, --openai.NAME, --sft.NAME"
                )
            found[name] = [value] if equals else []
        elif name is None:
            raise SettingsError(f"{text!r} belongs to no option; write it after the --NAME that it is for")
        else:
            found[name].append(text)
    return found


def _flags(chosen: Mapping[str, Sequence[str]], wanted: Any) -> list[str]:
    return [text for name, values in chosen.items() if wanted(name) for text in (f"--{name}", *values)]


def _parser(*, help_all: bool | None = None) -> argparse.ArgumentParser:
    """`help_all` adds what only a help shows: the settings that most people set, or all of them."""
    parser = VerbParser(prog="lachesis train", description=__doc__, epilog=_EPILOG)
    add = parser.add_argument
    add(
        "--env",
        action="append",
        metavar="ENV",
        help=f"{ENVIRONMENT}; repeat it to train on several (default: environments: of the file)",
    )
    add(
        "--config",
        metavar="FILE",
        help="YAML file with training:, env:, openai: and environments: (flags win over it)",
    )
    add(
        "--warm-start",
        type=int,
        metavar="N",
        help="fine-tune first on N items that the environment's reference policy solves (training.warm_start)",
    )
    add(
        "--rollout-api",
        choices=("lachesis", "stock", "running"),
        default="lachesis",
        metavar="API",
        help="lachesis starts `lachesis api`, stock Atropos' run-api; running: one is at env.rollout_server_url",
    )
    add(
        "--max-restarts",
        type=int,
        default=5,
        metavar="N",
        help="how often a process is started again within ten minutes (default: %(default)s)",
    )
    if help_all is False:
        group = parser.add_argument_group("settings that most people set")
        add_flags(group, "training", TrainingSettings, names=("name", "base_model", "num_steps", "learning_rate"))
        add_flags(group, "env", EnvSettings, names=("group_size", "batch_size"))
    elif help_all:
        of_training = parser.add_argument_group("settings of the trainer (training: in YAML)")
        add_flags(of_training, "training", TrainingSettings)
        add_flags(parser.add_argument_group("settings of --sft (sft: in YAML)"), "sft", SftSettings)
        groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items() if name != "own"}
        add_flags(groups, "env", HermesAgentEnvConfig)
        add_flags(groups, "openai", ServerConfig)
    return parser
