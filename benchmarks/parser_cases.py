"""Damaged model output through our parsers and vLLM's: the outcomes of a file of cases, by class and format.

    python benchmarks/parser_cases.py CASES [--vllm FOLDER] [--rows]

CASES is a JSONL file. A row has `format`, `class`, `text`, `tools`, and `expected`: `calls_one_of` (readings, each a
list of `[name, arguments]`), `calls` (the only reading), `content`, or `status_of_attempt` with `strict_calls` (a form
that is not the model's own). Other rows, and those of a format without a parser of ours, are left out. FOLDER is that
of an unpacked vLLM wheel; its parsers need `regex`, `openai`, `transformers`, `partial-json-parser` and `ijson`.

right     a reading that the row allows; if the row asks for a status, with that status, and no call in strict mode
unmarked  the row asks for a status, and the call is given as if its form were sound
wrong     another call: markup in a value, an argument lost. If the row names no reading, it differs from ours
attempt   no call, and a record of a failed attempt, which vLLM's interface does not have
silent    no call, and nothing says that one was tried
raised    an error
not run   the parser is absent, or it does not read the call in its sound form either, so that damage says nothing
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.vllm_parsers import VLLMParsers
from tool_call_parsers import CallStatus, UnknownParser, get_parser

OUTCOMES = ("right", "unmarked", "wrong", "attempt", "silent", "raised", "not run")
ALL = "all"
EXPECTED = {"calls_one_of", "calls", "content", "status_of_attempt"}
NEEDED = ("regex", "openai", "transformers", "partial_json_parser", "ijson")
"""Without these the parsers run on placeholders, and their results would not be vLLM's."""

Calls: TypeAlias = list[tuple[str, Any]]


@dataclass(frozen=True)
class Reading:
    """What one parser made of a text."""

    calls: Calls
    content: str | None = None
    attempts: list[str] = field(default_factory=list)
    """Statuses."""
    strict_calls: Calls | None = None
    """`None` if the parser has no strict mode."""


@dataclass(frozen=True)
class Case:
    format: str
    kind: str
    text: str
    tools: list[dict[str, Any]]
    expected: dict[str, Any]

    @property
    def wanted(self) -> list[Calls] | None:
        """The readings that the row allows, or `None` if it names none."""
        if (readings := self.expected.get("calls_one_of")) is None:
            readings = [self.expected["calls"]] if "calls" in self.expected else None
        return readings and [[(name, arguments) for name, arguments in reading] for reading in readings]


def load(path: Path) -> list[Case]:
    """The rows about a parser of ours and what it reads."""
    cases = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if not EXPECTED & row["expected"].keys():
            continue
        try:
            get_parser(row["format"])
        except UnknownParser:
            continue
        cases.append(Case(row["format"], row["class"], row["text"], row["tools"], row["expected"]))
    return cases


def our_reading(case: Case) -> Reading:
    parser = get_parser(case.format, reasoning="auto" if "content" in case.expected else None)
    found = parser.parse(case.text, case.tools)
    strict = parser.parse(case.text, case.tools, strict=True)
    return Reading(
        [(call.name, call.arguments) for call in found.tool_calls],
        found.content,
        [call.status.value for call in found.attempts],
        [(call.name, call.arguments) for call in strict.tool_calls],
    )


def their_name(format: str, names: Sequence[str]) -> str | None:
    """vLLM's name of a format of ours."""

    def is_same(name: str) -> bool:
        try:
            return get_parser(name).name == format
        except UnknownParser:
            return False

    return format if format in names else next(filter(is_same, names), None)


def their_reading(theirs: VLLMParsers, name: str, text: str, case: Case) -> Reading:
    content, calls = theirs.serve(name, text, case.tools, name if "content" in case.expected else None)
    return Reading([(called, _value(arguments)) for called, arguments in calls], content)


def _value(arguments: str) -> Any:
    """Of the JSON, or the text if it is none: no reading allows that."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def same(one: Calls, other: Calls) -> bool:
    """As text: Python holds 1, 1.0 and True for equal."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


def outcome(case: Case, reading: Reading, ours: Reading) -> str:
    if not reading.calls:
        if "content" in case.expected and not case.expected.get("calls"):
            return "right" if reading.content == case.expected["content"] else "wrong"
        return "attempt" if reading.attempts else "silent"
    if (wanted := case.wanted) is not None:
        return "right" if any(same(reading.calls, calls) for calls in wanted) else "wrong"
    if "status_of_attempt" not in case.expected or not same(reading.calls, ours.calls):
        return "wrong"
    marked = case.expected["status_of_attempt"] in reading.attempts
    kept = reading.strict_calls is not None and same(reading.strict_calls, case.expected["strict_calls"])
    return "right" if marked and kept else "unmarked"


def why_not(theirs: VLLMParsers, name: str, case: Case, ours: Reading) -> str | None:
    """Why the parser cannot be judged here: it does not read the case's call as our `render` writes it."""
    calls = next(filter(None, case.wanted or [ours.calls]), None)
    if calls is None:
        return None
    wire = [{"function": {"name": called, "arguments": arguments}} for called, arguments in calls]
    sound = get_parser(case.format).render(None, None, wire, case.tools)
    try:
        reading = their_reading(theirs, name, sound, case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if same(reading.calls, calls) else f"reads {reading.calls} in the sound {sound!r}"


def judge(theirs: VLLMParsers, name: str, case: Case, ours: Reading) -> tuple[str, object]:
    """The outcome of vLLM's parser, and what shows it."""
    if (why := why_not(theirs, name, case, ours)) is not None:
        return "not run", why
    try:
        reading = their_reading(theirs, name, case.text, case)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"
    return outcome(case, reading, ours), reading.calls or reading.content


def table(counts: dict[tuple[str, str, str], Counter[str]]) -> None:
    """Print the outcomes. A class ends with the sum of its formats."""
    width = max(len(format) for _, format, _ in counts) + 2
    print(f"{'class':<11}{'format':<{width}}{'parser':<6}" + "".join(f"{what:>9}" for what in OUTCOMES))
    for (kind, format, who), found in sorted(
        counts.items(), key=lambda entry: (entry[0][0], entry[0][1] == ALL, entry[0])
    ):
        cells = "".join(f"{found[what] or '':>9}" for what in OUTCOMES)
        print(f"{kind:<11}{format:<{width}}{who:<6}{cells}".rstrip())


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("cases", type=Path, help="JSONL file")
    arguments.add_argument("--vllm", type=Path, help="folder of an unpacked vLLM wheel to compare with")
    arguments.add_argument("--rows", action="store_true", help="print the outcome of each row too")
    given = arguments.parse_args()
    if given.vllm and (absent := [module for module in NEEDED if importlib.util.find_spec(module) is None]):
        arguments.error(f"vLLM's parsers need {', '.join(absent)}")
    theirs = VLLMParsers(given.vllm) if given.vllm else None
    names = theirs.names() if theirs else []
    counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    not_run: dict[str, object] = {}
    called = marked = lost = 0
    for case in load(given.cases):
        ours = our_reading(case)
        found: dict[str, tuple[str, object]] = {"ours": (outcome(case, ours, ours), ours.calls or ours.attempts)}
        if ours.calls:
            called += 1
            marked += CallStatus.OK not in ours.attempts
        if theirs:
            name = their_name(get_parser(case.format).name, names)
            found["vLLM"] = judge(theirs, name, case, ours) if name else ("not run", "vLLM has no such parser")
            if found["vLLM"][0] == "not run":
                not_run[case.format] = found["vLLM"][1]
            lost += found["vLLM"] == ("silent", None)
        for who, (what, shown) in found.items():
            counts[case.kind, case.format, who][what] += 1
            counts[case.kind, ALL, who][what] += 1
            if given.rows:
                print(f"{case.kind:<11}{case.format:<14}{who:<6}{what:<9}{shown!r}")
    table(counts)
    print(f"ours: the status of the calls says that they were repaired in {marked} of {called} rows with calls")
    if theirs:
        print(f"vLLM: the text is lost too in {lost} of the silent rows")
        print("not run:", *(f"{format}: {why}" for format, why in not_run.items()), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
