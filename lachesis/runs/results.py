"""How a run came out: its figures, and the table that it ends with."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Protocol

from rich.console import Console
from rich.markup import escape
from rich.style import Style
from rich.table import Table
from rich.text import Text

from backends.errors import ExitCode
from backends.text import counted
from lachesis.figures.evaluations import figure_rows
from lachesis.figures.item_keys import repeated
from lachesis.figures.repaired_calls import NAME
from lachesis.figures.running_figures import RunningFigures
from lachesis.figures.summary import Summary
from lachesis.loop.outcome import advice_if_cut_off, listed
from lachesis.runs.failures import REPEATS
from lachesis.runs.prose import print_prose, print_table
from lachesis.runs.reports import NO_REPORT
from lachesis_messages.records.entries import COMPLETED_FILE, FAILED_FILE

Row = tuple[str, str]
LONGEST_LABEL = 24
"""Characters of a label that the column of values makes room for."""


def program() -> str:
    """How a person starts the command line here: by the path that was used where `lachesis` is not on PATH."""
    used = sys.argv[0]
    return "lachesis" if Path(used).name != "lachesis" or shutil.which("lachesis") else quote(used)


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Where `process` and `eval` write: everything next to the groups file."""

    groups: Path
    own_names: bool = False
    """Whether the files of trajectories begin with the name of the groups file: the plain names are another run's."""

    @property
    def report(self) -> Path:
        return self.groups.with_suffix(".html")

    @property
    def failures(self) -> Path:
        return self.groups.with_suffix(".failed.jsonl")

    @property
    def samples(self) -> Path:
        return self._trajectories(COMPLETED_FILE)

    @property
    def failed_samples(self) -> Path:
        return self._trajectories(FAILED_FILE)

    def _trajectories(self, name: str) -> Path:
        return self.groups.with_name(f"{self.groups.stem}.{name}" if self.own_names else name)


@dataclass(frozen=True, slots=True)
class RunResult:
    """How `process` or `eval` came out."""

    files: RunFiles
    summary: Summary
    played: int
    """Groups that this start finished; the others were there already."""
    seconds: float
    tokens: int
    """Completion tokens that this start sampled, left-out rollouts and broken starts included."""
    failed_groups: int
    """Groups of this start without a single scored rollout; a second start plays them again."""
    figures: RunningFigures
    """Of the rollouts of this start."""
    exceptions: int
    """Rollouts of this start that met an exception in the environment's own code."""
    exhausted: bool
    """The environment had no more items."""
    declined: int = 0
    """Items of this start of which the environment itself made no group."""
    left_to_agents: int = 0
    """Groups of this start without a score by what their agents did, and by `leave_out`: nothing failed."""
    evaluation: bool = False
    """Then a group is one sample of an item."""
    short_of: int = 0
    """Items that were wanted, where the environment had fewer."""
    requested: int | None = None
    """Items that this evaluation asked for; earlier ones may have left others in the folder."""
    omitting: tuple[int, int] = (0, 0)
    """Completed trajectories without their images, and others."""
    min_reward: float | None = None
    """Minimum reward of a rollout to be among the completed trajectories."""

    @property
    def failed(self) -> bool:
        return bool(self.failed_groups or self.exceptions)

    @property
    def exit_code(self) -> ExitCode:
        if not self.failed:
            return ExitCode.DONE if self.summary.scored else ExitCode.FAILED  # no data is no success
        of_settings = self.figures.causes.of_settings and not self.exceptions
        return ExitCode.SETTINGS if of_settings else ExitCode.FAILED

    def rows(self) -> Iterator[Row]:
        summary = self.summary
        left_out = summary.rollouts - summary.scored
        earlier = summary.groups > self.played + self.failed_groups + self.left_to_agents
        now = f" ({self.played:,} in this run)" if earlier else ""
        again = repeated(summary.scores)
        if self.evaluation:
            yield from figure_rows(summary)
            yield "items", f"{summary.items:,}{again}"
            yield "rollouts", f"{summary.rollouts:,}{now}"
        else:
            yield "mean reward", str(summary.reward) if summary.scored else "no rollout has a score"
            yield "items", f"{summary.items:,}{again}{now}"
            yield "rollouts", f"{summary.rollouts:,}" + (f", {left_out:,} left out" if left_out else "")
        yield from summary.exclusion.rows(evaluation=self.evaluation)
        yield "outcomes", listed(summary.outcomes.items()) or "none"
        yield "turns", f"{summary.turns:.2f} per rollout"
        calls = round(summary.tool_calls * summary.rollouts)
        failed = f"; {summary.failed_calls:,} of {calls:,} failed" if summary.failed_calls else ""
        yield "tool calls", f"{summary.tool_calls:.2f} per rollout{failed}"
        for line in summary.tool_failures.lines():
            yield "failed calls", line
        if summary.repaired.parsed:
            yield "repaired calls", f"{summary.repaired}: {NAME}"
        if summary.most_versions > 1 or summary.interrupts:
            yield (
                "weights",
                f"{summary.versions:.2f} versions per rollout, at most {summary.most_versions}; "
                f"{counted(summary.interrupts, 'interrupt')}",
            )
        if summary.compression_metrics():
            in_vain = counted(summary.failed_compressions, "time")
            yield "contexts", f"{summary.compressions:,} compressed, {in_vain} failed"
        if summary.discarded:
            yield "rolled back", counted(summary.discarded, "completion")
        if summary.branched:
            shared = "" if summary.uncounted_requests else f": {counted(summary.inherited_tokens, 'token')} shared"
            sampled = f", {summary.completion_tokens:,} sampled" if shared else ""
            yield "branched", f"{counted(summary.branched, 'rollout')} off another one{shared}{sampled}"
        if summary.beside:
            beside = counted(summary.beside, "token")
            yield "beside", f"{beside} outside rollouts: of judges, or of rollouts that the environment dropped"
        yield from omitted_rows(sum(self.omitting))
        for name, value in summary.metrics.items():
            yield name, f"{value:.3f}"
        waiting = f", plus {summary.seconds_waiting:.1f} s waiting for servers and sandboxes"
        if max(summary.seconds_own, summary.seconds_waiting) >= 0.05:
            waited = waiting if summary.seconds_waiting >= 0.05 else ""
            own = f"per rollout {summary.seconds_own:.1f} s in model and tools{waited}"
            yield "time", f"{self.seconds:.1f} s for this start; {own}"
        yield from summary.cost_rows()
        if self.tokens and not summary.uncounted_requests:
            rate = self.tokens / max(self.seconds, 1e-9)
            yield "tokens/s", f"{rate:,.0f} ({self.tokens:,} in {self.seconds:.1f} s)"

    def paths(self) -> Iterator[tuple[str, Path]]:
        yield "groups", self.files.groups
        others = "not completed"
        if self.min_reward is not None:
            others += f", or reward below {self.min_reward:g}"
        for label, path in (("trajectories", self.files.samples), (others, self.files.failed_samples)):
            if path.exists() and path.stat().st_size:
                yield label, path
        if self.files.report.exists():
            yield "report", self.files.report

    def next_steps(self) -> Iterator[str]:
        summary, files = self.summary, self.files
        if not summary.rollouts:
            return
        if not summary.scored and (line := next((cause.line for cause in self.figures.causes), "")):
            yield f"correct {line}, then the same command"
            return
        yield f"{program()} view {quote(str(files.groups.parent))}   (every rollout, in the browser)"
        best = max(summary.rewards, default=0.0)
        if best > 0 and not self.evaluation:
            yield f"{program()} export {quote(str(files.groups))} --format trl -o trl.jsonl   (or openai, dpo, ...)"
            if files.samples.exists() and files.samples.stat().st_size and not self.omitting[0]:
                samples = quote(str(files.samples))
                yield (
                    f"{program()} train --sft {samples} --sft.min_reward {best:g} --training.base_model MODEL   "
                    "(fine-tune on the best rollouts)"
                )

    def advice(self) -> Iterator[str]:
        summary = self.summary
        best = max(summary.rewards, default=0.0)
        if summary.scored > 1 and len(summary.rewards) == 1:
            if best <= 0:
                yield f"every reward is {best:.2f}: {self._why_zero()}"
            elif not self.evaluation and self._sampled:
                yield (
                    f"every reward is {best:.2f}, so a trainer has nothing to learn from: try harder items, a smaller "
                    "model, or a higher --env.agent_temperature"
                )

    def _why_zero(self) -> str:
        if advice := advice_if_cut_off(self.summary.outcomes, self.summary.scored):
            return advice
        then = ", then try easier items or a larger model" if self._sampled else ""
        return f"read some rollouts (is the task clear, and does the reward see the work?){then}"

    @property
    def _sampled(self) -> bool:
        """Whether a model played, and not a reference policy."""
        return bool(self.summary.completion_tokens or self.summary.uncounted_requests)

    def notes(self) -> Iterator[str]:
        if self.requested is not None and self.summary.items > self.requested:
            yield (
                f"the figures are of {self.summary.items:,} items, and this start requested {self.requested:,}: the "
                "others are of earlier starts in this folder; evaluate in another folder to have these alone"
            )

    def warnings(self) -> Iterator[str]:
        summary = self.summary
        if alarm := summary.exclusion.alarm:
            yield alarm
        if summary.unlearns_calls:
            yield summary.unlearns_calls
        if self.short_of:
            asked = "get_eval_items" if self.evaluation else "get_next_item"
            setting = "eval_items" if self.evaluation else "total_steps"
            yield (
                f"the items ran out: {asked} gave {summary.items} of the {self.short_of} that env.{setting} requests; "
                f"give it more, or lower --env.{setting}"
            )
        if causes := self.figures.causes:
            yield "rollouts without a score:"
            yield from (f"  {line}" for line in causes.lines())
        if faults := self.figures.faults:
            yield "rollouts whose agent is at fault, by what it did or left, or by a limit too low for the task:"
            yield from (f"  {line}" for line in faults.lines())
        yield from self.figures.broken_lines()
        if self.failed_groups:
            what = "rollouts had no score" if self.evaluation else "groups had no scored rollout"
            again = "start again to play them" if causes.may_pass else REPEATS
            yield f"{self.failed_groups} of the {what}; {again}"
        if summary.failed_compressions:
            yield (
                f"a context stayed as it was {counted(summary.failed_compressions, 'time')}, the last time because: "
                f"{summary.uncompressed_because}"
            )
        if self.declined:
            yield f"{counted(self.declined, 'item')} without a group: the environment returned none"
        if self.left_to_agents:
            yield (
                f"{counted(self.left_to_agents, 'group')} without a score: score_of_timeout or score_of_agent_fault "
                "leaves out what their agents did"
            )
        if self.exceptions and not causes:
            yield f"{counted(self.exceptions, 'rollout')} ended in an exception of the environment; see the report"
        if not self.files.report.exists():
            yield NO_REPORT


def omitted_rows(count: int) -> Iterator[Row]:
    """What to say of trajectories that have lost their images."""
    if count:
        what = "1 trajectory has" if count == 1 else f"{count:,} trajectories have"
        yield "images", f"{what} only their types ([image_url]), so SFT refuses them; the groups have the images"


def folded(command: str, width: int) -> str:
    """A command in lines that still can be pasted, and below it what it is for, which follows three spaces."""
    line, gap, use = command.partition("   (")
    lines = []
    while len(line) > width and (at := line.rfind(" --", 1, width - 1)) > 0:
        lines.append(f"{line[:at]} \\")
        line = f" {line[at:]}"
    return "\n".join([*lines, line, *([f"({use}"] if gap else [])])


class ShownResult(Protocol):
    """The final output of a run."""

    def rows(self) -> Iterator[Row]: ...
    def paths(self) -> Iterable[tuple[str, Path]]:
        return ()

    def next_steps(self) -> Iterable[str]:
        """Commands that a person may want now."""
        return ()

    def advice(self) -> Iterable[str]:
        """Hints from the metrics."""
        return ()

    def warnings(self) -> Iterator[str]: ...


def path_link(path: Path) -> Text:
    """The path, on a terminal as a link to it."""
    return Text(str(path), style=Style(link=path.absolute().as_uri()))


def print_result(console: Console, result: ShownResult) -> None:
    """The table that a run ends with, and where everything is."""
    for note in getattr(result, "notes", tuple)():  # what must be known to read the rows, where there is any
        print_prose(console, f"note: {note}", style="yellow")
    table = Table(show_header=False, box=None, pad_edge=False)
    rows, paths = [*result.rows()], [*result.paths()]
    width = max(12, *(size for label, _ in (*rows, *paths) if (size := len(label)) <= LONGEST_LABEL))
    table.add_column(style="bold", no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    print_table(console, table)
    for advice in result.advice():  # about the rewards, so it stands with the figures and not below the files
        print_prose(console, advice, style="default")
    for label, path in paths:  # outside of the table: a path that is wrapped cannot be copied
        console.print(Text.assemble((f"{label:<{width}}  ", "bold"), path_link(path)), soft_wrap=True)
    for step, line in enumerate(result.next_steps()):
        if console.is_terminal and width + 2 + len(line) > console.width:
            line = folded(line, console.width - width - 2).replace("\n", f"\n{'':<{width + 2}}")
        console.print(Text.assemble((f"{'' if step else 'next':<{width}}  ", "bold"), line), soft_wrap=True)
    for warning in result.warnings():
        print_prose(console, warning, style="yellow")
