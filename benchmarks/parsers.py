"""CPU time of the tool-call parsers: by completion, by size, on floods of tags, by streamed delta, and to import.

    python benchmarks/parsers.py [name ...] [--vllm FOLDER]

The figures are CPU time of this process, the best of several runs. Texts are made with `render` and from the
tags that it writes. `--vllm FOLDER` names an unpacked vLLM wheel, whose parsers then read the same texts.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.imports import cpu_seconds
from benchmarks.vllm_parsers import VLLMParsers
from tool_call_parsers import ToolCallParser, get_parser, list_parsers

COMPLETION_US = 60.0
"""CPU microseconds for a completion of 500 characters, `get_parser()` included."""
LONG_MS = 5.0
"""CPU milliseconds for a string of 100 kB."""
RATIO = 2.5
"""The limit for the cost of twice the text, as a multiple."""
FLOOD_MS = 200.0
"""CPU milliseconds for 100 kB of tags without meaning."""
DELTA_US = 10.0
"""CPU microseconds per streamed delta of four characters."""
IMPORT_MS = 50.0
SLOW = 0.3
"""A foreign parser that takes this many CPU seconds gets no longer texts."""

KB = 1000
SIZE, CALLS, PARAMETERS, FLOOD = 100 * KB, 400, 400, 40 * KB
REPEATS = 5

CODE = '''def area(r: float) -> float:
    """The area of a circle, in m²."""
    return 3.14159 * r ** 2  # "exact" enough

'''
COUNTS = ("calls", "parameters")


def tool(name: str, parameters: dict[str, str]) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


NAMES = [f"p{index}" for index in range(PARAMETERS)]
TOOLS = [
    tool("write_file", {"path": "string", "text": "string", "mode": "integer", "append": "boolean"}),
    tool("wide", dict.fromkeys(NAMES, "string")),
    tool("noop", {}),
]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}}


def cpu(task: Callable[[], object], repeats: int = REPEATS, least: float = 0.005) -> float:
    """CPU seconds of one run: the best of `repeats`, each of enough runs to last `least` seconds."""
    runs, best = 1, math.inf
    gc.collect()
    gc.disable()
    try:
        while repeats:
            started = time.process_time()
            for _ in range(runs):
                task()
            taken = time.process_time() - started
            if taken < least:
                runs *= 10 if taken < least / 10 else 2
                continue
            best = min(best, taken / runs)
            repeats -= 1
    finally:
        gc.enable()
    return best


@dataclass
class Row:
    """The figures of one format."""

    name: str
    completion_us: float = math.nan
    long_ms: float = math.nan
    ratios: dict[str, float] = field(default_factory=dict)
    flood_ms: float = 0.0
    flood_ratio: float = 0.0
    worst_flood: str = ""
    delta_us: float = math.nan
    missed: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Fill `missed`."""
        worst = max(self.ratios, key=self.ratios.__getitem__)
        limits = [
            ("completion", self.completion_us, COMPLETION_US, "us"),
            ("100 kB string", self.long_ms, LONG_MS, "ms"),
            (f"twice the {worst}", self.ratios[worst], RATIO, "x"),
            (f"flood of {self.worst_flood}", self.flood_ms, FLOOD_MS, "ms"),
            (f"twice the flood of {self.worst_flood}", self.flood_ratio, RATIO, "x"),
            ("delta", self.delta_us, DELTA_US, "us"),
        ]
        self.missed = [
            f"{what}: {got:.3g} {unit} (limit {limit:g})" for what, got, limit, unit in limits if not got <= limit
        ]


def completion(parser: ToolCallParser) -> str:
    """About 500 characters: a sentence if the format has room for one, and a call."""
    arguments = {"path": "/srv/app/geometry.py", "text": CODE * 3, "mode": 420, "append": False}
    content = None if alone(parser) else "I will write the file now."
    text = parser.render(content, None, [call("write_file", **arguments)], TOOLS)
    assert 400 < len(text) < 900, (parser.name, len(text))
    return text


def sized_completion(parser: ToolCallParser, _: int) -> str:
    return completion(parser)


def alone(parser: ToolCallParser) -> bool:
    """Whether text beside a call turns the call into text."""
    text = parser.render("Now.", None, [call("noop")], TOOLS)
    return len(parser.parse(text, TOOLS).tool_calls) != 1


def long_string(parser: ToolCallParser, size: int) -> str:
    """One call with one string."""
    return parser.render(
        None, None, [call("write_file", path="/a", text=(CODE * (size // len(CODE) + 1))[:size])], TOOLS
    )


def many_calls(parser: ToolCallParser, count: int) -> str:
    return parser.render(None, None, [call("write_file", path="/a", text=str(n)) for n in range(count)], TOOLS)


def many_parameters(parser: ToolCallParser, count: int) -> str:
    return parser.render(None, None, [call("wide", **dict.fromkeys(NAMES[:count], "some text"))], TOOLS)


def floods(parser: ToolCallParser) -> Iterator[tuple[str, Callable[[int], str]]]:
    """Texts of any length that begin like a call and hold none, as `(what, make(length))`."""
    whole = parser.render(None, None, [call("write_file", path="Qa", text="Qb")], TOOLS)
    name, first, second = whole.index("write_file"), whole.index("Qa"), whole.index("Qb")
    opener, to_value, parameter = whole[:name], whole[:first], whole[first:second]
    closer = whole[second + 2 :]

    def repeated(head: str, unit: str) -> Callable[[int], str]:
        return lambda length: head + unit * (max(0, length - len(head)) // len(unit))

    if opener.strip():
        yield "openers", repeated("", opener)
        yield "blanks after an opener", repeated(opener, " ")
        yield "lines after an opener", repeated(opener, "\n")
    yield "calls cut at their first value", repeated("", to_value)
    yield "parameters without an end", repeated(to_value, parameter)
    yield "parameter openers", repeated(to_value + "x", parameter.removeprefix("Qa"))
    yield "closers", repeated("", closer or "}")
    yield "closers in a value", repeated(to_value, closer or "}")
    for what, unit in [
        ("brackets", "["),
        ("objects", '{"a":'),
        ("quotes", '"'),
        ("apostrophes", "'"),
        ("backslashes", "\\"),
        ("angles", "<"),
    ]:
        yield f"{what} in a value", repeated(to_value, unit)
        yield f"{what} as arguments", repeated(opener + "write_file", unit)
        yield f"{what} alone", repeated("", unit)
    if parser.reasoning is not None or parser.format.channels:
        thought = parser.render("Qc", "Qr", [], TOOLS)
        begin = thought[: thought.index("Qr")]
        yield "reasoning openers", repeated("", begin)
        yield "openers in reasoning", repeated(begin, opener or to_value)
        yield "drafts in reasoning", repeated(begin, whole)
        end = thought[thought.index("Qr") + 2 : thought.index("Qc")]
        yield "turns of reasoning", repeated("", begin + "hm" + end + whole)


def ratio(parse: Callable[[str], object], make: Callable[[int], str], size: int) -> tuple[float, float]:
    """CPU seconds for `size`, and their multiple of those for half of it.

    A parser that is slow on an eighth of the text does not get the rest: the seconds are extrapolated.
    """
    steps = 0
    if cpu(partial(parse, make(size // 8)), 1, 0.001) > SLOW / 8:
        size, steps = size // 8, 3
    half, full = make(size // 2), make(size)
    found, seconds = math.inf, math.inf
    for _ in range(3):  # a disturbed measurement is repeated; a slow parser stays slow
        taken = cpu(partial(parse, full), 2)
        times = taken / cpu(partial(parse, half), 2) * (2 * len(half) / len(full))
        if times < found:
            found, seconds = times, taken
        if found <= RATIO:
            break
    return seconds * found**steps, found


def stream(parser: ToolCallParser, pieces: list[str]) -> None:
    streaming = parser.stream(TOOLS)
    for piece in pieces:
        streaming.feed(piece)
    streaming.finish()


def measure(name: str) -> Row:
    """All figures of one format."""
    parser = get_parser(name, reasoning="auto")

    def parse(text: str) -> object:
        return parser.parse(text, TOOLS)

    row = Row(name)
    text = completion(parser)
    row.completion_us = 1e6 * cpu(lambda: get_parser(name).parse(text, TOOLS)) * 500 / len(text)
    seconds, row.ratios["size"] = ratio(parse, partial(long_string, parser), SIZE)
    row.long_ms = 1e3 * seconds
    if len(parser.parse(many_calls(parser, 3), TOOLS).tool_calls) == 3:
        row.ratios["calls"] = ratio(parse, partial(many_calls, parser), CALLS)[1]
    row.ratios["parameters"] = ratio(parse, partial(many_parameters, parser), PARAMETERS)[1]
    for what, make in floods(parser):
        seconds, times = ratio(parse, make, FLOOD)
        seconds *= 100 * KB / FLOOD
        if (times > RATIO, seconds) > (row.flood_ratio > RATIO, row.flood_ms / 1e3):
            row.flood_ms, row.flood_ratio, row.worst_flood = 1e3 * seconds, times, what
    text = long_string(parser, 32 * KB)
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    row.delta_us = 1e6 * cpu(partial(stream, parser, pieces), 3) / len(pieces)
    row.check()
    return row


def compare(name: str, theirs: VLLMParsers) -> str:
    """A line of vLLM's figures on the same texts, each with its multiple of ours."""
    try:
        run = theirs.parse(name)
    except Exception as error:
        return f"{name:<18}not run: {type(error).__name__}: {error}"[:110]
    parser = get_parser(name)

    def ours(text: str) -> int:
        return len(get_parser(name).parse(text, TOOLS).tool_calls)

    cells = []
    for make, sizes, unit in (
        (partial(sized_completion, parser), (500,), "chars"),
        (partial(long_string, parser), (KB, 10 * KB, 100 * KB), "chars"),
        (partial(many_parameters, parser), (20, 100, 400), "parameters"),
    ):
        for size in sizes:
            text = make(size)
            try:
                found = run(text)
                taken = cpu(partial(run, text), 3)
            except Exception as error:
                cells.append(f"{size} {unit}: {type(error).__name__}")
                break
            times = taken / cpu(partial(ours, text), 3)
            cell = f"{size} {unit}: {1e3 * taken:.4g} ms, {times:.3g}x" + (" (no call)" if found != 1 else "")
            if taken > SLOW:
                break
        cells.append(cell)
    return f"{name:<18}" + "".join(f"{cell:<42}" for cell in cells).rstrip()


def import_ms() -> float:
    """CPU milliseconds of `import tool_call_parsers`, beyond those of an interpreter that imports nothing."""
    cpu_seconds("import tool_call_parsers")  # writes the byte code
    return 1e3 * (
        min(cpu_seconds("import tool_call_parsers") for _ in range(9)) - min(cpu_seconds("pass") for _ in range(9))
    )


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", nargs="*", help="parsers; all by default")
    arguments.add_argument("--vllm", type=Path, help="folder of an unpacked vLLM wheel to compare with")
    given = arguments.parse_args()
    missed = []
    print(f"{'':<18}{'500 chars':>10}{'100 kB':>9}{'twice the':>19}{'':>9}{'worst flood':>14}{'':>8}{'delta':>9}")
    heads = f"{'size':>10}{'calls':>9}{'params':>9}{'ms/100 kB':>14}{'twice':>8}{'us':>9}  flood of"
    print(f"{'parser':<18}{'us':>10}{'ms':>9}{heads}")
    for name in given.names or list_parsers():
        row = measure(name)
        times = f"{row.ratios['size']:>10.2f}" + "".join(f"{row.ratios.get(what, math.nan):>9.2f}" for what in COUNTS)
        print(
            f"{name:<18}{row.completion_us:>10.1f}{row.long_ms:>9.2f}{times}{row.flood_ms:>14.1f}{row.flood_ratio:>8.2f}"
            f"{row.delta_us:>9.2f}  {row.worst_flood}",
            flush=True,
        )
        missed += [f"{name}: {what}" for what in row.missed]
    taken = import_ms()
    print(f"import tool_call_parsers: {taken:.1f} ms")
    if not taken <= IMPORT_MS:
        missed.append(f"import: {taken:.1f} ms (limit {IMPORT_MS:g})")
    if given.vllm:
        print("\nvLLM, construction included, and how many times ours:")
        theirs = VLLMParsers(given.vllm, TOOLS)
        for name in given.names or list_parsers():
            print(compare(name, theirs), flush=True)
        print()
    if missed:
        print(f"{len(missed)} limits missed:", *missed, sep="\n  ")
    else:
        print("every figure is within its limit")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
