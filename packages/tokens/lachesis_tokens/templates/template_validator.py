"""Validates that prompts can extend sampled turns with a chat template, on a set of cases.

The cases are conversations with and without a system prompt, tools, reasoning, empty content, one and several calls,
results, unicode and texts that contain special tokens. For each kind of continuation they answer two questions. Does
the template write the same suffix whatever the earlier messages are, so that a placeholder can render it? And is
prompt + sampled text + suffix equal to the template's rendering of the whole conversation?
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from lachesis_client.errors import TemplateError
from lachesis_tokens.templates.chat_template import ChatTemplate, Tools
from lachesis_tokens.templates.suffix_template import (
    Placeholder,
    Shape,
    SuffixTemplate,
    TemplateTokens,
    calls_of,
    generation_prompt_of,
    render_suffix,
    shared_length,
    suffix_template_of,
)
from lachesis_tokens.templates.template_cases import (
    PLAIN,
    SYSTEM,
    TOOLS,
    Pattern,
    TemplateCase,
    call_of,
    describe_context,
    following_of,
    mark,
    odd_turns,
    omitted,
    plain_turns,
    turn_of,
)
from lachesis_tokens.templates.template_report import Extension, Finding, TemplateDifference

_MOST_FINDINGS: Final = 256


class TemplateValidator:
    """The findings about one template. `tokens` are the tokenizer's added tokens, `ends` those that end a turn."""

    def __init__(self, template: ChatTemplate, tokens: Collection[str], ends: Sequence[str]) -> None:
        self.template = template
        self._tokens = tokens
        self._spelled = ends[0] if ends else "<|end|>"
        self._findings: dict[Pattern, Finding] = {}
        self._rendered: dict[str, str | None] = {}
        self._validating = threading.Lock()  # long prompts are written in a thread
        self._cases: dict[Pattern, TemplateCase] = {}
        patterns = [Pattern(calls, (role,)) for calls, role in ((0, "user"), (1, "tool"), (2, "tool"), (1, "user"))]
        shown = [
            text
            for pattern in patterns
            for text in (self._last(pattern.calls), self._suffix(self._case(pattern), _bare(pattern.calls)))
            if text
        ]
        self._template_tokens = TemplateTokens(tokens, ends, *shown)

    def find(self, pattern: Pattern) -> Finding:
        """The finding for a kind of continuation, validated once."""
        finding = self._findings.get(pattern)
        if finding is None:
            with self._validating:
                finding = self._validate(pattern)
                self._rendered.clear()
            if len(self._findings) < _MOST_FINDINGS:
                self._findings[pattern] = finding
        return finding

    def shows_tools(self) -> bool:
        """Whether the template writes the tools into the prompt."""
        name = TOOLS[0]["function"]["name"]
        for context in (PLAIN, (SYSTEM, *PLAIN)):
            try:
                with self._validating:
                    if name in self._render(context, TOOLS):
                        return True
            except TemplateError:
                continue
        return False

    def headers(self) -> set[str]:
        """The tokens with which the template ends a message and opens the next."""
        with self._validating:
            return self._headers()

    def _headers(self) -> set[str]:
        asked = self._case(Pattern(0, ("user",)))
        header = self._header(_bare(0), Pattern(0, ("user",))) or ""
        opener = self._template_tokens.find(self._generation_prompt(asked, _bare(0)))[:1]
        return {token for token in (*self._template_tokens.find(header), *opener) if token.strip()}

    def _validate(self, pattern: Pattern) -> Finding:
        kept: list[tuple[TemplateCase, str]] = []
        rejection = ""
        for case in plain_turns(pattern, self._spelled):
            try:
                kept.append((case, self._whole(case)))
            except TemplateError as error:
                rejection = rejection or error.reason
        if not kept:
            return Finding(pattern, Extension.REJECTED, rejection)
        if left_out := omitted(pattern, self._spelled, [whole for _, whole in kept]):
            return Finding(pattern, Extension.OMITS, f"it leaves out {left_out}")
        reason = "the template writes no placeholder for the turn exactly once"
        for placeholder in _placeholders(pattern):
            suffix_template = self._suffix_template(placeholder, pattern)
            if suffix_template is None:
                continue
            odd = [case for case, whole in kept if not self._suffix_fits(whole, case, placeholder, suffix_template)]
            if not odd:
                differences = self._differences(pattern, [case for case, _ in kept], placeholder, suffix_template)
                extension = Extension.DIVERGES if differences else Extension.PREFIX
                return Finding(
                    pattern,
                    extension,
                    "",
                    differences,
                    placeholder,
                    suffix_template,
                    self._generation_prompt(kept[0][0], placeholder),
                )
            reason = f"the suffix of the turn depends on the messages before it ({describe_context(odd[0])})"
        return Finding(pattern, Extension.UNEXTENDABLE, reason)

    def _suffix_fits(
        self, whole: str, case: TemplateCase, placeholder: Placeholder, suffix_template: SuffixTemplate
    ) -> bool:
        text = self._suffix(case, placeholder)
        rest = suffix_template.missing(text) if text is not None else None
        return rest is not None and whole.endswith(rest)

    def _generation_prompt(self, case: TemplateCase, placeholder: Placeholder) -> str:
        text, without = (self._suffix(case, placeholder, add_generation_prompt=which) or "" for which in (True, False))
        return generation_prompt_of(text, without, self._tokens)

    def _suffix_template(self, placeholder: Placeholder, pattern: Pattern) -> SuffixTemplate | None:
        last_text, header_text = self._last(0), self._header(Placeholder(Shape.TEXT), Pattern(0, ("user",)))
        last = self._last(pattern.calls) if placeholder.shape is Shape.CALLS else last_text
        header = self._header(placeholder, pattern)
        if last is None or header is None:
            return None
        if placeholder.shape is Shape.TEXT:
            last_text, header_text = last, header
        return suffix_template_of(
            self._template_tokens,
            placeholder.shape,
            header,
            last=last,
            last_text=last_text or "",
            header_text=header_text or "",
            between=self._two_calls() if placeholder.shape is Shape.CALLS else None,
        )

    def _differences(
        self, pattern: Pattern, cases: Sequence[TemplateCase], placeholder: Placeholder, suffix_template: SuffixTemplate
    ) -> tuple[TemplateDifference, ...]:
        found: dict[TemplateDifference, None] = {}
        for case in (*cases, *odd_turns(pattern, self._spelled)):
            difference = self._difference(case, placeholder, suffix_template)
            for key, cause in (
                ("reasoning", TemplateDifference.REASONING),
                ("content", TemplateDifference.BESIDE_CALLS),
            ):
                if difference is not None and (plain := case.without(key)) != case:
                    other = self._difference(plain, placeholder, suffix_template)
                    if other is not difference:
                        found[cause] = None
                    case, difference = plain, other
            if difference is not None:
                found[difference] = None
        return tuple(difference for difference in TemplateDifference if difference in found)

    def _difference(
        self, case: TemplateCase, placeholder: Placeholder, suffix_template: SuffixTemplate
    ) -> TemplateDifference | None:
        """How prompt + sampled text + suffix differs from the rendering of the whole conversation."""
        try:
            whole, prompt, bare, last = self._render_all(
                ((*case.context, case.turn, *case.following), case.tools, True),
                (case.context, case.tools, True),
                (case.context, case.tools, False),
                ((*case.context, case.turn), case.tools, False),
            )
        except TemplateError:
            return None
        text = self._suffix(case, placeholder)
        rest = suffix_template.missing(text) if text is not None else None
        if text is None or rest is None or not whole.endswith(rest):
            return TemplateDifference.BESIDE_CALLS
        for longer in (whole, last):
            if not longer.startswith(prompt):
                early = shared_length(longer, prompt) < shared_length(bare, prompt)
                return TemplateDifference.EARLIER if early else TemplateDifference.GENERATION_PROMPT
        end = self._end_of_last(placeholder, suffix_template)
        if not last.endswith(end):
            return TemplateDifference.TURN
        words = last[len(prompt) : len(last) - len(end)]
        ended_by = suffix_template.sampled_end if suffix_template.sampled_end in end else ""
        sampled = words + end[: end.find(ended_by) + len(ended_by)]
        if f"{prompt}{sampled}{suffix_template.missing(text, ended_by)}" == whole:
            return None
        if words == whole[len(prompt) : len(whole) - len(rest)]:
            return TemplateDifference.END_OF_TURN
        return TemplateDifference.TURN

    def _whole(self, case: TemplateCase) -> str:
        return self._render((*case.context, case.turn, *case.following), case.tools)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Tools | None, *, add_generation_prompt: bool = True
    ) -> str:
        return self._render_all((messages, tools, add_generation_prompt))[0]

    def _render_all(self, *asked: tuple[Sequence[Mapping[str, Any]], Tools | None, bool]) -> list[str]:
        """The texts for messages with or without tools and a generation prompt. Raises TemplateError."""
        keys = [json.dumps([messages, bool(tools), adds]) for messages, tools, adds in asked]
        # One validation uses the same text several times.
        new = {key: each for key, each in zip(keys, asked, strict=True) if key not in self._rendered}
        if new:
            self._rendered |= zip(new, self.template.write_all(new.values()), strict=True)
        return [self._rendered[key] or "" for key in keys]

    def _suffix(
        self, case: TemplateCase, placeholder: Placeholder, *, add_generation_prompt: bool = True
    ) -> str | None:
        """The text after the placeholder's words; None if the template rejects it or does not write it once."""
        # Only the parts that the placeholder takes from the case make a difference.
        calls, system = case.turn.get("tool_calls"), case.system if placeholder.system else None
        tools = case.tools if placeholder.tools else None
        key = json.dumps([placeholder.shape, calls, case.following, system, bool(tools), add_generation_prompt])
        if key not in self._rendered:
            try:
                self._rendered[key] = render_suffix(
                    self.template,
                    placeholder,
                    [self.template.prepare(message) for message in case.following],
                    calls=calls_of(case.turn),
                    system=self.template.prepare(system) if system is not None else None,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                )
            except TemplateError:
                self._rendered[key] = None
        return self._rendered[key]

    def _case(self, pattern: Pattern) -> TemplateCase:
        """A plain turn, with everything that a placeholder may take."""
        case = self._cases.get(pattern)
        if case is None:
            turn, following = turn_of(pattern.calls), following_of(pattern, self._spelled)
            case = self._cases[pattern] = TemplateCase((SYSTEM, *PLAIN), turn, following, TOOLS)
        return case

    def _last(self, calls: int) -> str | None:
        """The text after the words of a turn that is the last message."""
        return self._suffix(self._case(Pattern(calls, ())), _bare(calls), add_generation_prompt=False)

    def _header(self, placeholder: Placeholder, pattern: Pattern) -> str | None:
        """The text between the words of a turn and those of the next message."""
        for system, tools in ((placeholder.system, placeholder.tools), (True, True)):
            text = self._suffix(self._case(pattern), Placeholder(placeholder.shape, system, tools))
            if text is not None:
                return text.partition(mark(0))[0]
        return None

    def _two_calls(self) -> str | None:
        """The text between the words of two calls."""
        names = [call_of(number, {"x": mark(number)}) for number in range(2)]
        turn = {"role": "assistant", "content": "", "tool_calls": names}
        try:
            text = self._render((*PLAIN, turn), None, add_generation_prompt=False)
        except TemplateError:
            return None
        _, found, after = text.partition(mark(0))
        return after.partition(mark(1))[0] if found and mark(1) in after else None

    def _end_of_last(self, placeholder: Placeholder, suffix_template: SuffixTemplate) -> str:
        """The template's end of a turn that is the last message."""
        last = self._last(0 if placeholder.shape is Shape.TEXT else 1) or ""
        if placeholder.shape is Shape.TEXT:
            return last
        at = last.find(suffix_template.sampled_end) if suffix_template.sampled_end else -1
        if at < 0:
            return ""
        return last[at - len(suffix_template.lead) if last.endswith(suffix_template.lead, 0, at) else at :]


def _placeholders(pattern: Pattern) -> Iterator[Placeholder]:
    """The placeholders to try, the cheapest first."""
    answered = bool(pattern.roles) and pattern.roles[0].startswith("tool")
    shapes = [Shape.CALLS] if pattern.calls else [Shape.TEXT]
    if pattern.calls and not answered:
        shapes.append(Shape.TEXT)
    for system, tools in ((False, False), (True, False), (False, True), (True, True)):
        for shape in shapes:
            yield Placeholder(shape, system, tools)


def _bare(calls: int) -> Placeholder:
    """A placeholder that takes nothing but the new messages."""
    return Placeholder(Shape.CALLS if calls else Shape.TEXT)
