"""The calls that a chat template writes itself, and whether a parser reads them back.

A template shows how its model calls: the turns of the history are what the model was trained to write. `TemplateCalls`
renders turns with hard values, as the text that the model would sample after the generation prompt. Rendering is the
caller's: this package has no Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Final, Protocol, TypeAlias

from tool_call_parsers.engine import FOREIGN
from tool_call_parsers.parser import ToolCallParser
from tool_call_parsers.types import CallStatus, MinimalParser, ToolSchemas

Message: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[str, dict[str, Any]]


class Render(Protocol):
    """Renders OpenAI messages with a chat template. Raises any exception for what the template rejects."""

    def __call__(self, messages: list[Message], tools: ToolSchemas | None, add_generation_prompt: bool) -> str: ...


def _tool(name: str, **properties: object) -> dict[str, Any]:
    described = {key: {**value, "description": "What."} for key, value in properties.items() if isinstance(value, dict)}
    parameters = {"type": "object", "properties": described, "required": list(described)}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_BOOLEAN, _OBJECT = {"type": "boolean"}, {"type": "object"}
_OPTIONS = {"type": "object", "properties": {"a": _OBJECT, "f": _OBJECT}}
TOOLS: Final[list[dict[str, Any]]] = [
    _tool("probe_search", query=_STRING, limit=_INTEGER),
    _tool("probe_ping"),
    _tool("probe_write", path=_STRING, text=_STRING),
    _tool("probe_measure", count=_INTEGER, scale=_NUMBER, on=_BOOLEAN, off=_BOOLEAN),
    _tool("probe_configure", options=_OPTIONS, stages={"type": "array", "items": {"type": "array", "items": _NUMBER}}),
]
"""The tools that the calls call."""

_MARK: Final = "tide tables"
_SEARCH: Final[Call] = ("probe_search", {"query": _MARK, "limit": 3})
_LINES = 'first "quoted" line\n\n  it\'s {"x": [1]} & <b>third</b>,\tC:\\notes'


@dataclass(frozen=True, slots=True)
class Probe:
    """A turn that the template is asked to write."""

    name: str
    calls: tuple[Call, ...]
    content: str = ""


PROBES: Final[tuple[Probe, ...]] = (
    Probe("a call", (_SEARCH,)),
    Probe("two calls", (_SEARCH, ("probe_ping", {}))),
    Probe("a call after text", (_SEARCH,), "Let me look."),
    Probe("a call without arguments", (("probe_ping", {}),)),
    Probe("quotes, lines and backslashes", (("probe_write", {"path": "a b.txt", "text": _LINES}),)),
    Probe("numbers and booleans", (("probe_measure", {"count": -7, "scale": 0.25, "on": True, "off": False}),)),
    Probe(
        "nested values",
        (("probe_configure", {"options": {"a": {"b": ["c", {"d": "e"}]}, "f": {}}, "stages": [[1, 2.5], [-3]]}),),
    ),
)
"""The first is the plain one: a template that does not show it renders no calls."""
PLAIN: Final = PROBES[0].name


@dataclass(frozen=True, slots=True)
class Sample:
    """What the template writes for a probe."""

    probe: Probe
    prompt: str
    """The generation prompt."""
    text: str
    """The text that a model would sample after it, mostly without the end of the turn."""


@dataclass(frozen=True, slots=True)
class _Form:
    """How messages must look for a template."""

    content: str | None
    arguments_as_text: bool
    id: str
    flat: bool
    """The call has its name and arguments beside `function`, too."""
    answered: bool
    """The results of the calls follow."""

    def messages(self, probe: Probe) -> list[Message]:
        calls = []
        for index, (name, arguments) in enumerate(probe.calls):
            given = json.dumps(arguments, ensure_ascii=False) if self.arguments_as_text else arguments
            function = {"name": name, "arguments": given}
            id = self.id.format(name=name, index=index)
            calls.append({"id": id, "type": "function", "function": function, **(function if self.flat else {})})
        turn: Message = {"role": "assistant", "content": probe.content or self.content, "tool_calls": calls}
        results = [
            {"role": "tool", "tool_call_id": call["id"], "name": name, "content": _RESULT}
            for call, (name, _) in zip(calls, probe.calls, strict=True)
        ]
        return [turn, *(results if self.answered else [])]


_RESULT: Final = "probe-result"
_USER: Final[Message] = {"role": "user", "content": "When is the tide high?"}
_SAID: Final = "The tide is high at noon."
# Mistral's ids have nine letters and digits, Kimi's name the tool.
_FORMS: Final = tuple(
    _Form(content, as_text, id, flat, answered)
    for answered, flat, id, content, as_text in product(
        (False, True), (False, True), ("call0000{index}", "functions.{name}:{index}"), ("", None), (False, True)
    )
)


@dataclass(frozen=True, slots=True)
class Unread:
    """A probe that a parser does not read back."""

    sample: Sample
    why: str

    def __str__(self) -> str:
        return f"{self.sample.probe.name}: {self.why}"


@dataclass(frozen=True, slots=True)
class TemplateCalls:
    """The calls that a template writes. Without samples it writes none."""

    samples: tuple[Sample, ...]

    @classmethod
    def of(cls, render: Render) -> TemplateCalls:
        """Render the probes. A probe that the template rejects, or shows in part only, has no sample."""
        for form, tools in product(_FORMS, (TOOLS, None)):
            writer = _Writer(render, form, tools)
            if writer.sample(PROBES[0]) is not None:
                return cls(tuple(sample for probe in PROBES if (sample := writer.sample(probe)) is not None))
        return cls(())

    def unread(self, parser: ToolCallParser | MinimalParser, *, until: int | None = None) -> list[Unread]:
        """The samples that a parser does not read back, the first `until` only."""
        found: list[Unread] = []
        for sample in self.samples:
            if (why := _difference(parser, sample)) is not None:
                found.append(Unread(sample, why))
                if len(found) == until:
                    break
        return found

    def best(self, parsers: Iterator[tuple[str, ToolCallParser]]) -> tuple[str, list[Unread]] | None:
        """The name of the first parser that reads every sample, or else of the first that reads most of them, the
        plain call included; and what it does not read. None if no parser reads the plain call."""
        best: tuple[str, list[Unread]] | None = None
        for name, parser in parsers:
            unread = self.unread(parser, until=None if best is None else len(best[1]))
            if any(each.sample.probe.name == PLAIN for each in unread):
                continue
            if best is None or len(unread) < len(best[1]):
                best = name, unread
            if not unread:
                break
        return best


class _Writer:
    """Renders probes in one form."""

    def __init__(self, render: Render, form: _Form, tools: ToolSchemas | None) -> None:
        self._render, self._form, self._tools = render, form, tools

    def sample(self, probe: Probe) -> Sample | None:
        """The probe as the template writes it; None if it rejects the probe or leaves a part of it out."""
        turn, *results = self._form.messages(probe)
        try:
            before, prompt, end = self._frame
            whole = self._render([_USER, turn, *results], self._tools, False)
        except Exception:  # templates reject messages with any exception
            return None
        text = whole[_shared(before, whole) :]
        if results:
            text = text.partition(_RESULT)[0]
        for name, arguments in probe.calls:
            # A mapping in Python's notation means that the template expects text.
            if name not in text or not all(key in text for key in arguments) or (arguments and repr(arguments) in text):
                return None
        return Sample(probe, prompt, text[_shared(prompt, text) :].removesuffix(end))

    @cached_property
    def _frame(self) -> tuple[str, str, str]:
        """The conversation before the turn, the generation prompt, and the end of a turn of text alone."""
        before = self._render([_USER], self._tools, False)
        prompted = self._render([_USER], self._tools, True)
        try:
            said = self._render([_USER, {"role": "assistant", "content": _SAID}], self._tools, False)
        except Exception:  # see `sample`
            said = ""
        return before, prompted[_shared(before, prompted) :], said.partition(_SAID)[2]


def _shared(begun: str, text: str) -> int:
    """The length of the common beginning of two texts, which ends in no marker that begins with `<` or `[`."""
    if text.startswith(begun):
        return len(begun)
    end = next((at for at, (one, other) in enumerate(zip(begun, text, strict=False)) if one != other), len(text))
    inside = re.search(r"(?:<[^>\s]{0,40}|\[[^\]\s]{0,40})\Z", text[:end])
    return inside.start() if inside else end


def _difference(parser: ToolCallParser | MinimalParser, sample: Sample) -> str | None:
    """Why a parser does not read a sample back; None if it does."""
    if isinstance(parser, ToolCallParser):
        opened = _opens_reasoning(parser, sample.prompt)
        found = parser.parse(sample.text, TOOLS, prompt_opened_reasoning=opened)
    else:
        found = parser.parse(sample.text, TOOLS)
    wanted = sample.probe.calls
    if all(attempt.error == FOREIGN for attempt in found.attempts):
        return "no call is found"
    for attempt in found.attempts:
        if attempt.status is not CallStatus.OK:
            return f"the call is {attempt.status}" + (f" ({attempt.error})" if attempt.error else "")
    called = [(call.name, call.arguments) for call in found.tool_calls]
    if [name for name, _ in called] != [name for name, _ in wanted]:
        return f"the calls are {', '.join(name for name, _ in called)}"
    for (_, given), (_, expected) in zip(called, wanted, strict=True):
        if _canonical(given) != _canonical(expected):
            return f"the arguments are {json.dumps(given, ensure_ascii=False)}"
    beside = f"{found.content or ''}{found.reasoning or ''}"
    if sample.probe.content in sample.text and sample.probe.content not in beside:
        return "the text beside the call is lost"
    return None


def _canonical(arguments: dict[str, Any]) -> str:
    # `true` is not 1, which Python takes for equal.
    return json.dumps(arguments, ensure_ascii=False, sort_keys=True)


def _opens_reasoning(parser: ToolCallParser, prompt: str) -> bool:
    if parser.reasoning is None:
        return False
    opened = max((prompt.rfind(marker) for marker in parser.reasoning.opens), default=-1)
    return opened > max((prompt.rfind(marker) for marker in parser.reasoning.closes), default=-1)
