"""`lachesis chat ENV`: a person in a rollout."""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from backends.errors import SettingsError
from lachesis.cli.play_environment import add_agent_flags
from lachesis.cli.verb_parser import ENVIRONMENT, MODEL, OF_ENVIRONMENT, VerbParser, count
from lachesis.loop.outcome import in_words

if TYPE_CHECKING:
    from lachesis.base_env import HermesAgentBaseEnv
    from lachesis.runs.results import RunResult
    from lachesis_console.chat.recordings import RecordedRollout
    from lachesis_console.chat.seat import Seat

_DESCRIPTION = f"""\
Talk to a model inside an item of an environment: its prompt, its tools, its sandbox. ENV is {ENVIRONMENT}.
Without ENV it is a chat with the agent's tools, set by cli-config.yaml.

/reward computes the reward as things stand; the end of the chat writes a rollout like any other. /help lists the
commands, Ctrl-C interrupts the answer or the tool, Ctrl-D ends the chat.
"""
_TURNS = 1000
_DRAWN = 2000
"""Items among which that of a recording is sought."""
_SEEKING = 15.0
"""Seconds at most in which the item with a number is drawn: a generator has no last one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Chat; the exit code."""
    parser = VerbParser(
        prog="lachesis chat",
        usage="lachesis chat [ENV] [options]",
        description=_DESCRIPTION,
        epilog="Every other setting has its own flag, --env.NAME VALUE or --openai.NAME VALUE.",
    )
    number = partial(count, least=0)
    parser.add_argument("--item", type=number, default=0, metavar="N", help="the item, counted from 0 (default: 0)")
    parser.add_argument(
        "--as", dest="seat", choices=("user", "agent"), default="user", help="whose part you take (default: user)"
    )
    parser.add_argument(
        "--replay", metavar="PATH[#ID]", help="replay a recorded rollout first: of a run's folder or file"
    )
    parser.add_argument("--at", type=number, metavar="N", help="turns of the recording to replay (default: all)")
    parser.add_argument("--session", metavar="NAME", help="keep the chat under this name, and continue it")
    parser.add_argument("--plain", action="store_true", help="no colours and no spinner")
    of_model = f"{MODEL} ({OF_ENVIRONMENT}; without ENV, that of cli-config.yaml)"
    parser.add_argument("-m", "--model", metavar="MODEL", help=of_model)
    parser.add_argument("-b", "--base-url", metavar="URL", help="URL of the OpenAI-compatible server")
    parser.add_argument("-k", "--api-key", metavar="KEY", help="API key of the server")

    def add(setting: str, metavar: str, text: str, *names: str, read: Any = str) -> None:
        parser.add_argument(*names, dest=setting, metavar=metavar, help=text, type=read)

    add_agent_flags(add, temperature="env.agent_temperature")
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", help="where the rollout is written; FOLDER-2 where it exists"
    )
    arguments = [*(argv or ())]
    target = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    given, flags = parser.parse_known_args(arguments)
    for name, value in (("model_name", given.model), ("base_url", given.base_url), ("api_key", given.api_key)):
        flags += [f"--openai.{name}={value}"] if value is not None else []
    flags += [f"--{name}={value}" for name, value in vars(given).items() if "." in name and value is not None]
    if given.output:
        from lachesis.runs.run_folder import unused

        flags.append(f"--env.data_path_to_save_groups={unused(Path(given.output)) / 'groups.jsonl'}")
    return asyncio.run(_chat(target, given, flags))


async def _chat(target: str | None, given: argparse.Namespace, flags: list[str]) -> int:
    from lachesis_console.chat.commands import COMMANDS, run_command
    from lachesis_console.chat.journal import Journal, chats_folder
    from lachesis_console.chat.plain import NAME
    from lachesis_console.chat.recordings import RecordedRollout, find_rollout, installed
    from lachesis_console.chat.screen import Screen
    from lachesis_console.chat.seat import Seat

    recorded = find_rollout(given.replay) if given.replay else None
    journal = Journal.named(given.session or f"{datetime.now():%Y-%m-%d-%H%M%S}-{uuid.uuid4().hex[:4]}")
    if target is None and recorded is not None:
        target = installed(recorded.environment)
    target = target or str(journal.about.get("environment") or NAME)
    if target == NAME and (recorded is not None or given.seat == "agent"):
        raise SettingsError("name the environment: lachesis chat ENV; `lachesis envs` lists some")
    unnamed = None if given.session else journal.path
    if journal.about:
        if recorded is not None:
            raise SettingsError(f"the chat {given.session} exists; replay into another one")
        if target != journal.about["environment"]:
            raise SettingsError(f"the chat {given.session} is one of {journal.about['environment']}, not of {target}")
        flags = [*journal.about["flags"], *flags]
        recorded = RecordedRollout(
            target, journal.about["item"], "", None, (), [*journal.messages], journal.lost, journal.prompt
        )
    screen = Screen(plain=given.plain, history=chats_folder().parent / "typed")
    as_agent = given.seat == "agent"
    seat = Seat(screen, journal, COMMANDS, run_command, as_agent=as_agent, recorded=recorded, turns=given.at)
    if target == NAME:
        return await _plain_chat(seat, recorded, flags)
    from lachesis.cli.environment_classes import environment_class

    if as_agent and not any(flag.startswith(("--openai.", "--config")) for flag in flags):
        flags = [*flags, "--openai.model_name=reference"]
    env = _environment(environment_class(target), flags, seat, recorded, given.item, target)
    screen.note(f"{env.run_name}: item {given.item}, {_who(env, seat)}. /help lists the commands.")
    result = await _played(env, seat)
    if result is None:
        screen.note(f"ended without a rollout; the messages are in {seat.journal.path}")
        return 0
    reward = f"{result.summary.reward.mean:g}" if result.summary.scored else "none"
    ended = [in_words(name) for name, count in result.summary.outcomes.items() if count and name != "completed"]
    reward += f" ({', '.join(ended)})" if ended else ""
    broken, files = _broken(env, seat, result), result.files
    screen.note(f"reward {reward}; the rollout is in {files.groups if result.summary.scored else files.failures}")
    if unnamed is not None:
        unnamed.unlink(missing_ok=True)
    return broken


async def _plain_chat(seat: Seat, recorded: RecordedRollout | None, flags: list[str]) -> int:
    """A chat without an environment."""
    from lachesis_console.agent.cli_config import load_cli_config
    from lachesis_console.chat.plain import NAME, PlainChat, config_flags, save

    config, screen = load_cli_config(), seat.screen
    names = {flag.partition("=")[0] for flag in flags}
    given = [*(flag for flag in config_flags(config) if flag.partition("=")[0] not in names), *flags]
    _settings(PlainChat, given)  # what is wrong there is said before somebody types
    screen.note(f"a chat; /help lists the commands, and comes after the first message. Its file is {seat.journal.path}")
    prompt = recorded.item["prompt"] if recorded is not None else await seat.line("you> ")
    while prompt is not None and not prompt.strip():
        prompt = await seat.line("you> ")
    if prompt is None:
        return 0
    seat.begin(prompt)
    with TemporaryDirectory(prefix="chat-") as folder:
        given = [f"--env.data_path_to_save_groups={folder}/groups.jsonl", *given]
        env = _environment(PlainChat, given, seat, recorded, 0, NAME, item={"prompt": prompt}, chosen=flags)
        result = await _played(env, seat)
    if config["agent"]["save_trajectories"]:
        model = env.server_configs[0].model_name
        screen.note(f"the trajectory is in {save(prompt, seat.journal.messages, seat.loop.tool_schemas, model)}")
    return 0 if result is None else _broken(env, seat, result)


def _broken(env: HermesAgentBaseEnv, seat: Seat, result: RunResult) -> int:
    """Say what failed, with the traceback that the run has printed; the exit code."""
    causes = [cause for cause in result.figures.causes if cause.kind != "declined"]
    if causes:
        printed = env.console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        seat.screen.note("\n".join(line for line in printed if not line.startswith(f"{env.run_name}: groups ")))
    for cause in causes:
        seat.screen.error(f"{cause.kind}: {cause.example}")
    return int(bool(causes))


async def _played(env: HermesAgentBaseEnv, seat: Seat) -> RunResult | None:
    """The result; None if the person ended the chat without an answer."""
    from lachesis.runs.commands import process

    run = asyncio.ensure_future(process(env))
    seat.stop = run.cancel
    try:
        return await run
    except asyncio.CancelledError:
        if not seat.stopped:
            raise
        return None
    finally:
        for server in seat.opened:
            await server.close()


def _environment(
    env_cls: type[HermesAgentBaseEnv],
    flags: list[str],
    seat: Seat,
    recorded: RecordedRollout | None,
    number: int,
    target: str,
    *,
    item: Any = None,
    chosen: Sequence[str] | None = None,
) -> HermesAgentBaseEnv:
    """The environment with one item, whose rollout has `seat` in the place of the model.

    Args:
        item: None means the one with that number.
        chosen: the flags that the chat keeps, if not all.
    """
    from rich.console import Console

    from lachesis.loop.loop import HermesAgentLoop
    from lachesis.runs.run_folder import data_folder, unused
    from lachesis.settings.hooks import of_hook
    from lachesis_console.replaced import with_methods
    from lachesis_tools.on_request import with_requested

    done: list[bool] = []
    chosen = flags if chosen is None else chosen

    async def get_next_item(env: HermesAgentBaseEnv) -> Any:
        if done:
            return None
        done.append(True)
        if (found := item) is None:
            found = await drawn(env)
        if not seat.journal.about:
            seat.journal.begin({"environment": target, "flags": _kept(chosen), "item": found})
        return found

    async def drawn(env: HermesAgentBaseEnv) -> Any:
        item = await of_hook(env_cls.get_next_item(env))
        # A recorded item is drawn too: an environment may keep what it knows of it.
        until = time.monotonic() + _SEEKING
        if recorded is None and number > _DRAWN:
            seat.screen.note(f"looking for item {number}")
        for at in range(number if recorded is None else _DRAWN):
            if item is None or (recorded is not None and item == recorded.item):
                break
            if recorded is None and time.monotonic() > until:
                raise SettingsError(
                    f"item {number} is too far: {_SEEKING:g} s lead to item {at}; choose a lower --item"
                )
            item = await of_hook(env_cls.get_next_item(env))
        if recorded is not None:
            item = recorded.item
        elif item is None:
            raise SettingsError(f"{target} has no item {number}")
        return item

    def player_for(env: HermesAgentBaseEnv, item: Any) -> Any:
        player = env_cls.player_for(env, item)

        def make_loop(server: Any, tools: Sequence[Mapping[str, Any]], **options: Any) -> Any:
            loop = player.make_loop(server, tools, **options)
            if not isinstance(loop, HermesAgentLoop):
                raise SettingsError(f"{target}: its agent is a program, so there is no one to chat with")
            return seat.attach(loop, server, player, item)

        return replace(player, make_loop=make_loop)

    settings = _settings(env_cls, flags)
    tools = with_requested(env_cls.tools, settings["config"].enabled_toolsets, user=True)
    env = with_methods(env_cls, get_next_item=get_next_item, player_for=player_for, tools=tools)(**settings)
    seat.model, seat.tool_call_parser = env.server_configs[0], env.config.tool_call_parser
    env.console = Console(emoji=False, file=io.StringIO())
    groups = Path(env.config.data_path_to_save_groups or data_folder(env.run_name) / "groups.jsonl")
    # One that is there would be continued, which has nothing left to play.
    env.config.data_path_to_save_groups = str(unused(groups.parent) / groups.name if groups.exists() else groups)
    return env


def _kept(flags: Sequence[str]) -> list[str]:
    """The flags for the file of a chat, without secrets and the folder. A value may be a word of its own."""
    groups = re.split(r"\0(?=--)", "\0".join(flags))
    left_out = re.compile(r"\bapi_key\b|\.headers\b|\bheaders\W*:|\.data_path_to_save_groups\b")
    kept = "\0".join(each for each in groups if not left_out.search(each))
    return kept.split("\0") if kept else []


def _settings(env_cls: type[HermesAgentBaseEnv], flags: Sequence[str]) -> dict[str, Any]:
    """The arguments of the environment's constructor; SettingsError names a flag that is wrong."""
    from lachesis.runs.command_line import read_settings

    chosen = {name: value for name, value in _CHOSEN.items() if not any(f".{name}" in flag for flag in flags)}
    given = [*(f"--env.{name}={value}" for name, value in chosen.items()), *flags]
    return read_settings(env_cls, ["process", *given], prog="lachesis chat")[1]


_CHOSEN = {
    "group_size": 1,
    "total_steps": 1,
    "use_wandb": False,
    "max_infra_retries": 0,
    "max_agent_turns": _TURNS,
    "max_faulty_turns": _TURNS,
    "terminal_lifetime": 24 * 3600,
}


def _who(env: HermesAgentBaseEnv, seat: Seat) -> str:
    if seat.as_agent:
        return "you are the agent"
    from lachesis.settings.server_settings import describe

    return f"you talk to {describe(env.server_configs)}"
