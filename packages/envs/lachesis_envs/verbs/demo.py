"""`lachesis demo`: two small tasks with tools, for a language model on this machine, and scored.

The first is a question that only a tool can answer. The embedded model, of 135 million parameters, tries it as it is,
and with an adapter that was trained on this task by `lachesis train`, on a CPU. Its file (93 MB) is downloaded on the
first start. The second is word problems with a Python tool in a sandbox, which are too hard for a model of this size.
There the reference policy, which is no model, replays each problem's worked solution.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from backends.text import counted
from lachesis.cli import command
from lachesis.cli.verb_parser import VerbParser, count
from lachesis.loop.outcome import in_words
from lachesis.other_packages import TOKENS, VIEW
from lachesis.runs.prose import print_table

MAX_TOKENS = 200
"""Of an answer to a word problem."""
ADAPTER = Path(__file__).parents[1] / "models" / "tool-result.gguf"
"""What `lachesis train` made of the embedded model for the first task; `models/README.md` says how."""


@dataclass(frozen=True)
class Act:
    """A player at a task: `folder` is where its rollouts go, `server` what plays.

    `choose` is `min` or `max`: whether a rollout with its lowest or its highest reward is shown.
    """

    folder: str
    task: str
    player: str
    server: Mapping[str, Any]
    choose: Callable[..., Any]


LOOK_UP, PROBLEMS = "pieces in stock", "word problems"
SMALL = "SmolLM2-135M"
ACTS = (
    Act("stock-base", LOOK_UP, SMALL, {"model_name": "embedded"}, min),
    Act("stock-trained", LOOK_UP, f"{SMALL}, trained", {"model_name": str(ADAPTER)}, max),
    Act("problems-base", PROBLEMS, SMALL, {"model_name": "embedded"}, min),
    Act("problems-reference", PROBLEMS, "reference policy (no model)", {"model_name": "reference"}, max),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Play, then print a table, the reports, and a trajectory of each player."""
    description = (__doc__ or "").replace("`lachesis demo`: two", "Two")
    parser = VerbParser(prog="lachesis demo", description=description)
    parser.add_argument("-n", "--items", type=count, default=6, metavar="N", help="items for each player (default: 6)")
    parser.add_argument(
        "-r",
        "--rollouts",
        old=["--group-size"],
        dest="group_size",
        type=count,
        default=2,
        metavar="N",
        help="rollouts per item (default: 2)",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("data/demo"),
        metavar="FOLDER",
        help="where to write (default: data/demo; an earlier demo there is removed first)",
    )
    parser.add_argument("--sandbox", choices=("bubblewrap", "none"), default="bubblewrap", help="none: run code as you")
    parser.add_argument("--open", action="store_true", help="at the end, show the rollouts in a browser, until Ctrl+C")
    arguments = parser.parse_args(argv)
    console = Console(emoji=False)
    TOKENS.load("fetch_model")(console)
    code = asyncio.run(_play(console, arguments))
    if arguments.open:
        return command("view")([str(arguments.output), "--open"])
    _say_what_is_next(console, quote(str(arguments.output)))
    return code


async def _play(console: Console, arguments: argparse.Namespace) -> int:
    from lachesis.runs.results import RunResult, path_link
    from lachesis.settings.server_settings import ServerConfig
    from lachesis_messages.records.groups import stored_messages
    from lachesis_messages.records.jsonl import read_lines

    results: dict[str, RunResult] = {}
    for play in ACTS:
        folder = arguments.output / play.folder
        if (folder / "groups.jsonl").exists():
            shutil.rmtree(folder)
        plays = f"plays {counted(arguments.items, 'item')}, {counted(arguments.group_size, 'rollout')} each"
        console.print(f"\n[bold]{play.task}[/bold]: {play.player} {plays}", highlight=False)
        env = _environment(play, arguments, folder)([ServerConfig(**play.server)])
        env.console = console
        results[play.folder] = await env.process_manager()

    console.print()
    print_table(console, _table(results))
    for play in ACTS:
        report = results[play.folder].files.report
        console.print(Text(f"  {play.folder:<20}") + path_link(report), soft_wrap=True)
    for play in ACTS:
        groups = read_lines(results[play.folder].files.groups)
        scored = [(group, one) for group in groups for one in group["rollouts"] if one["reward"] is not None]
        if scored:
            scored.sort(key=lambda pair: len(str(stored_messages(*pair))))  # of the best, one without stray words
            group, rollout = play.choose(scored, key=lambda pair: pair[1]["reward"])
            title = f"{play.player}: reward {rollout['reward']:.1f}, {in_words(rollout['outcome'])}"
            console.print()
            console.print(_trajectory(title, stored_messages(group, rollout)))
            if what := _between(play, results, [one for _, one in scored]):
                console.print(f"\n{what}", highlight=False)
    return 0 if all(result.summary.scored for result in results.values()) else 1


def _environment(play: Act, arguments: argparse.Namespace, folder: Path) -> Any:
    """What takes the servers and gives the environment of a play."""
    shared: dict[str, Any] = {
        "total_steps": arguments.items,
        "group_size": arguments.group_size,
        "data_path_to_save_groups": str(folder / "groups.jsonl"),
    }
    if play.task == LOOK_UP:
        from lachesis_envs.tool_call import DrawnItemsConfig, ToolResultEnv

        look_up = DrawnItemsConfig(  # as in training, and items that it does not see
            dataset_split="test", chat_template="hermes_short", max_token_length=48, agent_temperature=1.0, **shared
        )
        return partial(ToolResultEnv, look_up)
    from lachesis_envs.gsm8k import GSM8kAgentEnv, GSM8kEnvConfig

    problems = GSM8kEnvConfig(
        dataset_name="word_problems",
        sandbox=arguments.sandbox,
        max_token_length=MAX_TOKENS,
        agent_temperature=0.4,
        **shared,
    )
    return partial(GSM8kAgentEnv, problems)


def _say_what_is_next(console: Console, folder: str) -> None:
    from lachesis.runs.results import program

    lachesis = program()
    larger = f"{lachesis} eval gsm8k --env.dataset_name word_problems -n 20 -m MODEL -b URL"
    if not console.is_terminal:
        console.print(f"\nnext: {lachesis} view {folder}, or a larger model: {larger}", soft_wrap=True)
        return
    console.print("\n[bold]next[/bold]")
    for line, what in (
        (f"{lachesis} view {folder}", f"these rollouts in a browser, at {VIEW.load('address')()}"),
        (f"{lachesis} new my_env", "an environment of your own"),
        (larger, "a larger model"),
    ):
        console.print(f"  [cyan]{line}[/cyan]  {what}", highlight=False, soft_wrap=True)


def _between(play: Act, results: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]) -> str:
    """What leads from the trajectory of this play to that of the next one."""
    trained = results["stock-trained"].summary
    if play.folder == "stock-base" and trained.scored:
        base = results["stock-base"].summary
        return (
            f"Untrained, the model earns {base.reward.mean:.2f} on average: it guesses instead of asking the tool. "
            f"With an adapter of 0.8 MB, trained for half an hour on two cores, on 48 examples and then by rewards, it "
            f"earns {trained.reward.mean:.2f}, on items that the training has not seen:"
        )
    return _why_it_fails(rollouts) if play.folder == "problems-base" else ""


def _why_it_fails(rollouts: Sequence[Mapping[str, Any]]) -> str:
    solved = sum(rollout["reward"] > 0 for rollout in rollouts)
    counts = {
        "without a single call of the tool": sum(not rollout["tool_calls"] for rollout in rollouts),
        "with a call that failed": sum(bool(rollout["tool_errors"]) for rollout in rollouts),
        f"cut off at {MAX_TOKENS} tokens": sum(rollout["outcome"] == "context_exhausted" for rollout in rollouts),
    }
    how = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return (
        f"The model solved {solved} of {len(rollouts)}{f' ({how})' if how else ''}: with 135 million parameters it "
        "reasons badly and rarely calls the tool as it should. The reference policy replays the worked solutions of "
        "the same problems, and shows what a success looks like:"
    )


def _table(results: Mapping[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for column in ("task", "player", "rollouts", "reward", "calls", "failed"):
        text = column in ("task", "player")
        table.add_column(column, justify="left" if text else "right", no_wrap=not text)
    for play in ACTS:
        summary = results[play.folder].summary
        table.add_row(
            play.task,
            play.player,
            str(summary.rollouts),
            f"{summary.reward.mean:.2f}" if summary.scored else "–",
            f"{summary.tool_calls * summary.rollouts:.0f}",
            f"{summary.tool_errors * summary.rollouts:.0f}",
        )
    return table


def _trajectory(title: str, messages: Sequence[Mapping[str, Any]]) -> Panel:
    text = Text()
    colours = {"system": "dim", "user": "yellow", "assistant": "cyan", "tool": "green"}
    for message in messages:
        style = colours[message["role"]]
        if message.get("content"):
            text.append(f"{message['role']}: ", style=f"bold {style}")
            text.append(_cut(str(message["content"])) + "\n", style=style)
        for call in message.get("tool_calls") or ():
            text.append(f"calls {call['function']['name']}: ", style="bold magenta")
            text.append(_cut(call["function"]["arguments"]) + "\n", style="magenta")
    text.rstrip()
    return Panel(text, title=title, title_align="left")


def _cut(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
