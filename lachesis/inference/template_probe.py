"""What a chat template makes of conversations that go on, tried on a set of probes.

The probes are conversations with and without a system prompt, tools, reasoning, empty content, one and several calls,
results, unicode and texts that spell special tokens. For each kind of continuation they answer two questions: does the
same text come behind a turn whatever stood before it, so that a stand-in can tell it, and is prompt + sampled text +
that text what the template renders for the whole conversation?
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from lachesis.inference.chat_template import ChatTemplate, TemplateMessage, TemplateRefused, Tools
from lachesis.inference.continuations import (
    Markup,
    Seam,
    Shape,
    StandIn,
    behind,
    calls_of,
    generation_prompt_of,
    seam_of,
)
from lachesis.inference.probe_conversations import (
    PLAIN,
    SYSTEM,
    TOOLS,
    Pattern,
    Probe,
    call_of,
    following_of,
    mark,
    named,
    odd_turns,
    plain_turns,
    role_of,
    turn_of,
)

_MOST_FINDINGS: Final = 256


class Extension(StrEnum):
    """How a prompt goes on behind a sampled turn."""

    PREFIX = "prefix"
    """The prompt is, to the letter, what the template renders for the whole conversation."""
    DIVERGES = "diverges"
    """What comes behind the turn is the template's, but what it renders before that is something else once more
    follows: `Finding.differences` says what. The prompt keeps what was sampled."""
    UNEXTENDABLE = "unextendable"
    """What comes behind the turn depends on what stood before it, so a stand-in cannot tell it."""
    OMITS = "omits"
    """The template leaves the new messages out: the model would never see them."""
    REFUSED = "refused"
    """The template raises for such a conversation."""


class Difference(StrEnum):
    """What a template renders otherwise in a longer conversation than it did before."""

    REASONING = "reasoning of earlier turns is left out"
    GENERATION_PROMPT = "the end of the generation prompt is not kept"
    EARLIER = "what stood before the turn is rewritten"
    TURN = "the turn itself is rewritten"
    BESIDE_CALLS = "content beside calls is left out or moved"
    END_OF_TURN = "the turn ends with another token"


@dataclass(frozen=True, slots=True)
class Finding:
    """What the probes found out about a kind of continuation."""

    pattern: Pattern
    extension: Extension
    reason: str = ""
    """Why it cannot be extended; the template's own words where it refuses."""
    differences: tuple[Difference, ...] = ()
    stand_in: StandIn | None = None
    """How to find what comes behind the turn; None where it cannot be found."""
    seam: Seam | None = None
    tail: str = ""
    """The generation prompt, as it mostly is."""

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        record: dict[str, Any] = {"continuation": str(self.pattern), "extension": self.extension.value}
        if self.differences:
            record["differences"] = [difference.value for difference in self.differences]
        if self.reason:
            record["reason"] = self.reason
        return record


class TemplateProbe:
    """The findings about one template. `tokens` are the tokenizer's added tokens, `ends` those that end a turn."""

    def __init__(self, template: ChatTemplate, tokens: Collection[str], ends: Sequence[str]) -> None:
        self.template = template
        self._tokens = tokens
        self._spelled = ends[0] if ends else "<|end|>"
        self._findings: dict[Pattern, Finding] = {}
        self._lasts: dict[int, str] = {}
        self._rendered: dict[str, str] = {}
        shown = [
            text
            for calls, role in ((0, "user"), (1, "tool"), (2, "tool"), (1, "user"))
            for text in (self._last(calls), self._behind(StandIn(_shape(calls)), calls, (role,)))
            if text
        ]
        self._markup = Markup(tokens, ends, *shown)

    def find(self, pattern: Pattern) -> Finding:
        """What holds for a kind of continuation, proven once."""
        finding = self._findings.get(pattern)
        if finding is None:
            finding = self._prove(pattern)
            self._rendered.clear()
            if len(self._findings) < _MOST_FINDINGS:
                self._findings[pattern] = finding
        return finding

    def shows_tools(self) -> bool:
        """The template writes the tools that it is given into the prompt."""
        name = TOOLS[0]["function"]["name"]
        for context in (PLAIN, (SYSTEM, *PLAIN)):
            try:
                if name in self._render(context, TOOLS):
                    return True
            except TemplateRefused:
                continue
        return False

    # The proof

    def _prove(self, pattern: Pattern) -> Finding:
        probes = list(plain_turns(pattern, self._spelled))
        wholes: dict[int, str] = {}
        refusal = ""
        for number, probe in enumerate(probes):
            try:
                wholes[number] = self._render((*probe.context, probe.turn, *probe.following), probe.tools)
            except TemplateRefused as error:
                refusal = refusal or error.reason
        if not wholes:
            return Finding(pattern, Extension.REFUSED, refusal)
        if lost := self._lost(pattern, wholes):
            return Finding(pattern, Extension.OMITS, f"it leaves out {lost}")
        kept = [(probe, wholes[number]) for number, probe in enumerate(probes) if number in wholes]
        reason = "no stand-in for the turn is written once, and only once"
        for stand_in in _stand_ins(pattern):
            seam = self._seam(stand_in, pattern)
            if seam is None:
                continue
            odd = [probe for probe, whole in kept if not self._comes_behind(whole, probe, stand_in, seam)]
            if not odd:
                differences = self._differences(pattern, [probe for probe, _ in kept], stand_in, seam)
                extension = Extension.DIVERGES if differences else Extension.PREFIX
                return Finding(pattern, extension, "", differences, stand_in, seam, self._tail(kept[0][0], stand_in))
            reason = f"what comes behind the turn depends on what stood before it ({named(odd[0])})"
        return Finding(pattern, Extension.UNEXTENDABLE, reason)

    def _comes_behind(self, whole: str, probe: Probe, stand_in: StandIn, seam: Seam) -> bool:
        text = self._behind_probe(probe, stand_in)
        rest = seam.rest(text) if text is not None else None
        return rest is not None and whole.endswith(rest)

    def _tail(self, probe: Probe, stand_in: StandIn) -> str:
        text, without = (self._behind_probe(probe, stand_in, generation_prompt=which) or "" for which in (True, False))
        return generation_prompt_of(text, without, self._tokens)

    def _lost(self, pattern: Pattern, wholes: Mapping[int, str]) -> str:
        """Which of the new messages the template does not write."""
        roles = [role_of(message) for message in following_of(pattern, self._spelled)]
        for number, role in enumerate(roles):
            if role not in ("assistant", "calls") and any(mark(number) not in whole for whole in wholes.values()):
                return {"tool": "tool results", "user": "what the user says", "system": "system messages"}[role]
        return ""

    def _seam(self, stand_in: StandIn, pattern: Pattern) -> Seam | None:
        last_text, header_text = self._last(0), self._header(StandIn(Shape.TEXT), Pattern(0, ("user",)))
        last = self._last(pattern.calls) if stand_in.shape is Shape.CALLS else last_text
        header = self._header(stand_in, pattern)
        if last is None or header is None:
            return None
        if stand_in.shape is Shape.TEXT:
            last_text, header_text = last, header
        between = None
        if stand_in.shape is Shape.CALLS and (two := self._two_calls()) is not None:
            between = two
        return seam_of(
            self._markup,
            stand_in.shape,
            header,
            last=last,
            last_text=last_text or "",
            header_text=header_text or "",
            between=between,
        )

    def _differences(
        self, pattern: Pattern, probes: Sequence[Probe], stand_in: StandIn, seam: Seam
    ) -> tuple[Difference, ...]:
        found: dict[Difference, None] = {}
        for probe in (*probes, *odd_turns(pattern, self._spelled)):
            difference = self._difference(probe, stand_in, seam)
            for key, cause in (("reasoning", Difference.REASONING), ("content", Difference.BESIDE_CALLS)):
                plain = probe.without(key)
                if difference is not None and plain != probe:
                    other = self._difference(plain, stand_in, seam)
                    if other is not difference:
                        found[cause] = None
                    probe, difference = plain, other
            if difference is not None:
                found[difference] = None
        return tuple(difference for difference in Difference if difference in found)

    def _difference(self, probe: Probe, stand_in: StandIn, seam: Seam) -> Difference | None:
        """How prompt + sampled text + what comes behind differs from the rendering of the whole."""
        try:
            whole = self._render((*probe.context, probe.turn, *probe.following), probe.tools)
            prompt = self._render(probe.context, probe.tools)
            bare = self._render(probe.context, probe.tools, generation_prompt=False)
            last = self._render((*probe.context, probe.turn), probe.tools, generation_prompt=False)
        except TemplateRefused:
            return None
        text = self._behind_probe(probe, stand_in)
        rest = seam.rest(text) if text is not None else None
        if text is None or rest is None or not whole.endswith(rest):
            return Difference.BESIDE_CALLS
        for longer in (whole, last):
            if not longer.startswith(prompt):
                opening = _shared(bare, prompt)
                early = _shared(longer, prompt) < opening
                return Difference.EARLIER if early else Difference.GENERATION_PROMPT
        end = self._end_of_last(stand_in, seam)
        if not last.endswith(end):
            return Difference.TURN
        words = last[len(prompt) : len(last) - len(end)]
        ended_by = seam.sampled_end if seam.sampled_end in end else ""
        sampled = words + end[: end.find(ended_by) + len(ended_by)]
        if f"{prompt}{sampled}{seam.rest(text, ended_by)}" == whole:
            return None
        if words == whole[len(prompt) : len(whole) - len(rest)]:
            return Difference.END_OF_TURN
        return Difference.TURN

    # What the template writes

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, generation_prompt: bool = True
    ) -> str:
        key = json.dumps([messages, bool(tools), generation_prompt])
        if key not in self._rendered:  # one proof asks for the same text more than once
            prepared = [self.template.prepare(message) for message in messages]
            self._rendered[key] = self.template.render(prepared, tools, generation_prompt=generation_prompt)
        return self._rendered[key]

    def _behind(
        self, stand_in: StandIn, calls: int, roles: tuple[str, ...], *, generation_prompt: bool = True
    ) -> str | None:
        pattern = Pattern(calls, roles)
        following = [self.template.prepare(message) for message in following_of(pattern, self._spelled)]
        return self._stand_in_text(stand_in, calls_of(turn_of(calls)), following, generation_prompt=generation_prompt)

    def _behind_probe(self, probe: Probe, stand_in: StandIn, *, generation_prompt: bool = True) -> str | None:
        # Only what the stand-in takes over from the probe makes a difference.
        system = probe.system if stand_in.system else None
        tools = probe.tools if stand_in.tools else None
        key = json.dumps(
            [stand_in.shape, calls_of(probe.turn), probe.following, system, bool(tools), generation_prompt]
        )
        if key not in self._rendered:
            following = [self.template.prepare(message) for message in probe.following]
            text = self._stand_in_text(
                stand_in,
                calls_of(probe.turn),
                following,
                system=system,
                tools=tools,
                generation_prompt=generation_prompt,
            )
            if text is None:
                return None
            self._rendered[key] = text
        return self._rendered[key]

    def _stand_in_text(
        self,
        stand_in: StandIn,
        calls: tuple[tuple[str, str], ...],
        following: list[TemplateMessage],
        *,
        system: Mapping[str, Any] | None = None,
        tools: Tools | None = None,
        generation_prompt: bool = True,
    ) -> str | None:
        try:
            return behind(
                self.template,
                stand_in,
                following,
                calls=calls,
                system=self.template.prepare(system) if system is not None else None,
                tools=tools,
                generation_prompt=generation_prompt,
            )
        except TemplateRefused:
            return None

    def _last(self, calls: int) -> str | None:
        """What comes behind the words of a turn that is the last message."""
        if calls not in self._lasts:
            text = self._behind(StandIn(_shape(calls)), calls, (), generation_prompt=False)
            if text is None:
                return None
            self._lasts[calls] = text
        return self._lasts[calls]

    def _header(self, stand_in: StandIn, pattern: Pattern) -> str | None:
        """What comes behind the words of a turn, up to those of the next message."""
        for system, tools in ((stand_in.system, stand_in.tools), (True, True)):
            following = [self.template.prepare(message) for message in following_of(pattern, self._spelled)]
            text = self._stand_in_text(
                StandIn(stand_in.shape, system, tools),
                calls_of(turn_of(pattern.calls)),
                following,
                system=SYSTEM,
                tools=TOOLS,
            )
            if text is not None:
                return text.partition(mark(0))[0]
        return None

    def _two_calls(self) -> str | None:
        """What the template writes between the words of two calls."""
        names = [call_of(number, {"x": mark(number)}) for number in range(2)]
        turn = {"role": "assistant", "content": "", "tool_calls": names}
        try:
            text = self._render((*PLAIN, turn), None, generation_prompt=False)
        except TemplateRefused:
            return None
        _, found, after = text.partition(mark(0))
        return after.partition(mark(1))[0] if found and mark(1) in after else None

    def _end_of_last(self, stand_in: StandIn, seam: Seam) -> str:
        """The end of a turn that is the last message, as the template writes it."""
        last = self._last(0 if stand_in.shape is Shape.TEXT else 1) or ""
        if stand_in.shape is Shape.TEXT:
            return last
        at = last.find(seam.sampled_end) if seam.sampled_end else -1
        if at < 0:
            return ""
        return last[at - len(seam.lead) if last.endswith(seam.lead, 0, at) else at :]


def _stand_ins(pattern: Pattern) -> Iterator[StandIn]:
    """Those that can be tried, the cheapest first."""
    answered = bool(pattern.roles) and pattern.roles[0].startswith("tool")
    shapes = [Shape.CALLS] if pattern.calls else [Shape.TEXT]
    if pattern.calls and not answered:
        shapes.append(Shape.TEXT)
    for system, tools in ((False, False), (True, False), (False, True), (True, True)):
        for shape in shapes:
            yield StandIn(shape, system, tools)


def _shared(a: str, b: str) -> int:
    """Characters that two texts begin with alike."""
    return next((at for at, (one, other) in enumerate(zip(a, b, strict=False)) if one != other), min(len(a), len(b)))


def _shape(calls: int) -> Shape:
    return Shape.CALLS if calls else Shape.TEXT
