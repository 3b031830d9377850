"""`lachesis demo`: a small run with problems, tools, a sandbox, a language model and scored trajectories.

Two players get the same problems. The embedded model has 135 million parameters and mostly fails; its file (93 MB) is
downloaded on the first start. The reference policy is no model: it replays each problem's worked solution, and shows a
correct trajectory.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Mapping, Sequence
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
from lachesis.other_packages import TOKENS

MAX_TOKENS = 200
VIEWER = "http://127.0.0.1:7007"
"""Where `lachesis view` answers without options."""
PLAYERS = {"embedded": "SmolLM2-135M (embedded)", "reference": "reference policy (no model)"}


def main(argv: Sequence[str] | None = None) -> int:
    """Play, then print a table, the paths of the output, and two trajectories."""
    description = (__doc__ or "").replace("`lachesis demo`: a", "A")
    parser = argparse.ArgumentParser(prog="lachesis demo", description=description)
    parser.add_argument("--items", type=_count, default=6, metavar="N", help="problems for each player (default: 6)")
    parser.add_argument("--group-size", type=_count, default=2, metavar="N", help="rollouts of a problem (default: 2)")
    parser.add_argument(
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


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 up, got {text!r}")
    return int(text)


async def _play(console: Console, arguments: argparse.Namespace) -> int:
    from lachesis.runs.results import RunFiles, RunResult, path_link
    from lachesis.settings.server_settings import ServerConfig
    from lachesis_envs.gsm8k import GSM8kAgentEnv, GSM8kEnvConfig
    from lachesis_messages.records.groups import stored_messages
    from lachesis_messages.records.jsonl import read_lines

    results: dict[str, RunResult] = {}
    for player, title in PLAYERS.items():
        folder = arguments.output / player
        if (folder / "groups.jsonl").exists():
            shutil.rmtree(folder)
        config = GSM8kEnvConfig(
            total_steps=arguments.items,
            group_size=arguments.group_size,
            dataset_name="word_problems",
            sandbox=arguments.sandbox,
            max_token_length=MAX_TOKENS,
            agent_temperature=0.4,
            data_path_to_save_groups=str(folder / "groups.jsonl"),
        )
        plays = f"plays {counted(arguments.items, 'problem')}, {counted(arguments.group_size, 'rollout')} each"
        console.print(f"\n[bold]{title}[/bold] {plays}", highlight=False)
        env = GSM8kAgentEnv(config, [ServerConfig(model_name=player)])
        env.console = console
        results[player] = await env.process_manager()

    console.print()
    console.print(_table(results))
    for player, result in results.items():
        files: RunFiles = result.files
        console.print(f"\n[bold]{PLAYERS[player]}[/bold]", highlight=False)
        for label, path in (
            ("groups", files.groups),
            ("trajectories", files.samples),
            ("failed trajectories", files.failed_samples),
            ("report", files.report),
        ):
            if path.exists() and path.stat().st_size:
                console.print(Text(f"  {label:<20}") + path_link(path), soft_wrap=True)
    for player, choose in (("embedded", min), ("reference", max)):
        groups = read_lines(results[player].files.groups)
        scored = [(group, one) for group in groups for one in group["rollouts"] if one["reward"] is not None]
        if scored:
            group, rollout = choose(scored, key=lambda pair: pair[1]["reward"])
            title = f"{PLAYERS[player]}: reward {rollout['reward']:.1f}, {rollout['outcome']}"
            console.print()
            console.print(_trajectory(title, stored_messages(group, rollout)))
            if player == "embedded":
                console.print(f"\n{_why_it_fails([one for _, one in scored])}", highlight=False)
    return 0 if all(result.summary.scored for result in results.values()) else 1


def _say_what_is_next(console: Console, folder: str) -> None:
    larger = "lachesis eval gsm8k --env.dataset_name word_problems -n 20 -m MODEL -b URL"
    if not console.is_terminal:
        console.print(f"\nnext: lachesis view {folder}, or a larger model: {larger}", soft_wrap=True)
        return
    console.print("\n[bold]next[/bold]")
    for line, what in (
        (f"lachesis view {folder}", f"these rollouts in a browser, at {VIEWER}"),
        ("lachesis new my_env", "an environment of your own"),
        (larger, "a larger model"),
    ):
        console.print(f"  [cyan]{line}[/cyan]  {what}", highlight=False, soft_wrap=True)


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
    table = Table(
        title="Word problems with a Python tool",
        title_justify="left",
        box=SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for column in ("player", "items", "rollouts", "reward", "calls", "outcomes", "tok/s"):
        text = column in ("player", "outcomes")
        table.add_column(column, justify="left" if text else "right", no_wrap=text)
    for player, result in results.items():
        summary = result.summary
        speed = "–" if summary.uncounted_requests else f"{result.tokens / result.seconds:.0f}"
        outcomes = "\n".join(f"{name} {count}" for name, count in summary.outcomes.items())
        table.add_row(
            PLAYERS[player].replace(" (", "\n("),
            str(summary.items),
            str(summary.rollouts),
            f"{summary.reward.mean:.2f}" if summary.scored else "–",
            f"{summary.tool_calls * summary.rollouts:.0f}",
            outcomes,
            speed,
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
    return Panel(text, title=title, title_align="left")


def _cut(text: str, limit: int = 600) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
