"""Which messages a suffix is rendered after, so that it is what the template writes in the real conversation.

Templates may look at what messages say: with `/no_think` in the system message SmolLM3 has another generation prompt,
and Nemotron Nano v2 reads every user message. A suffix of a placeholder conversation does not show that. So the first
suffix of each kind after the first messages of a conversation is compared with the rendering of the real messages, and
where they differ the following suffixes are rendered after real messages. The rollouts of a group share the result.

A later message matters only if it contains a text that the template looks for. `reacts_to` are these texts: the
constants of the template that change a suffix when an earlier message contains them. Suffixes that depend on the
number, the kinds or the lengths of the messages before them are always rendered after the whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import product
from typing import Any, Final, TypeAlias

from jinja2 import nodes as jinja
from jinja2.optimizer import optimize

from backends.lazy import once_property
from lachesis_client.errors import TemplateError
from lachesis_messages.responses import ChatResponse, Node
from lachesis_tokens.templates.chat_template import ChatTemplate, TemplateMessage
from lachesis_tokens.templates.special_tokens import RenderedText
from lachesis_tokens.templates.suffix_template import calls_of, placeholder_turn
from lachesis_tokens.templates.template_cases import PLAIN, Pattern, call_of, mark, turn_of

_MOST_HEADS: Final = 1024
"""First messages in memory: more than the items in progress."""
_LONGEST: Final = 64
"""Characters of a text that a template looks for. Longer constants are its own prose."""
_MARKS: Final = tuple(map(mark, range(4)))
_CALL: Final = call_of(0, {})
_SAYING, _CALLING = turn_of(0), turn_of(1)
_RESULT: Final = {"role": "tool", "tool_call_id": "call00000", "name": "probe_search", "content": "low"}
_ASKING: Final = {"role": "user", "content": "Is it?"}
_CALLED: Final = (
    {"role": "assistant", "content": _MARKS[0], "tool_calls": [call_of(0, {"query": _MARKS[0]})]},
    _RESULT,
)
"""A turn that ends with a call, and what follows it."""

Surroundings: TypeAlias = tuple[list[TemplateMessage] | None, bool]
"""The messages before a suffix, None for those of the placeholder, and whether the tools are needed."""
Suffix: TypeAlias = Callable[[Sequence[TemplateMessage] | None, bool], RenderedText | None]
"""Renders a suffix in such surroundings."""


class Before(Enum):
    """The messages that a suffix is rendered after, the cheapest first."""

    PLACEHOLDER = auto()
    """Those of the placeholder conversation."""
    FIRST = auto()
    """The real messages before the first completion."""
    FIRST_WITH_TOOLS = auto()
    """The same, and the tools."""
    CONVERSATION = auto()
    """All real messages and the tools, with placeholders for completions. Costs O(conversation)."""


@dataclass(slots=True)
class _Head:
    """What is known of conversations with the same first messages and tools."""

    said: bool
    """A later message contained a text that the template looks for."""
    before: dict[Pattern, Before] = field(default_factory=dict)


class ContentDependence:
    """What the suffixes of one template depend on."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._heads: dict[tuple[str, str], _Head] = {}

    def messages_before(
        self,
        render: Suffix,
        nodes: Sequence[Node],
        index: int,
        following: Sequence[Mapping[str, Any]],
        pattern: Pattern,
        context: str,
    ) -> Surroundings | None:
        """What to render the suffix of the turn at `index` after; None if the suffix depends on what the model said.

        `context` is the digest of tools and template.
        """
        if self.reacts_to_turns:
            turns = (nodes[at].item for at in range(index + 1) if isinstance(nodes[at].origin, ChatResponse))
            if _contain(turns, self.reacts_to_turns):
                return None
        first, head = self._head(nodes, index + 1, context)
        if not head.said and self._later_texts:  # hardly any template looks for one
            head.said = _contain((*following, _placeholder_of(nodes[index].item)), self._later_texts)
        everything = head.said or bool(pattern.calls) in self._reads_everything
        before = Before.CONVERSATION if everything else head.before.get(pattern)
        if before is None:
            before = head.before[pattern] = self._find(render, nodes, first, index)
        return self._messages(before, nodes, first, index)

    def notice(self, nodes: Sequence[Node], context: str) -> None:
        """Look for texts in messages that come without a suffix: the template writes them in a whole conversation."""
        first, head = self._head(nodes, len(nodes), context)
        head.said = head.said or self._said(nodes[first:])

    def _head(self, nodes: Sequence[Node], length: int, context: str) -> tuple[int, _Head]:
        """The number of messages before the first completion, and what is known of conversations with these. `length`
        of the messages are looked at."""
        first = 0
        while first < length and not isinstance(nodes[first].origin, ChatResponse):
            first += 1
        key = (nodes[first - 1].digest if first else "", context)
        head = self._heads.get(key)
        if head is None:
            while len(self._heads) >= _MOST_HEADS:
                self._heads.pop(next(iter(self._heads)), None)
            head = self._heads[key] = _Head(self._said(nodes[first : length - 1]))
        return first, head

    def _said(self, nodes: Iterable[Node]) -> bool:
        if not self._later_texts:
            return False
        items = (node.item for node in nodes)
        shown = (_placeholder_of(item) if isinstance(item.origin, ChatResponse) else item for item in items)
        return _contain(shown, self._later_texts)

    def _find(self, render: Suffix, nodes: Sequence[Node], first: int, index: int) -> Before:
        """The fewest messages with which the suffix is the same as after all of them."""
        real = _tried(render, *self._messages(Before.CONVERSATION, nodes, first, index))
        for before in (Before.PLACEHOLDER, Before.FIRST, Before.FIRST_WITH_TOOLS):
            if real is None or _tried(render, *self._messages(before, nodes, first, index)) != real:
                continue
            if before is Before.PLACEHOLDER or self._lasts(render, real, nodes, first):
                return before
        return Before.CONVERSATION

    def _lasts(self, render: Suffix, real: RenderedText, nodes: Sequence[Node], first: int) -> bool:
        """Whether the suffix stays the same in longer conversations with these first messages."""
        messages, _ = self._messages(Before.FIRST, nodes, first, first)
        longer = ([*(messages or ()), *turn] for turn in _longer(self._template))
        return all(_tried(render, each, True) in (real, None) for each in longer)

    def _messages(self, before: Before, nodes: Sequence[Node], first: int, index: int) -> Surroundings:
        if before is Before.PLACEHOLDER:
            return None, False
        prepare = self._template.prepare
        messages: list[TemplateMessage] = []
        for at in range(index if before is Before.CONVERSATION else first):
            item = nodes[at].item
            sampled = isinstance(nodes[at].origin, ChatResponse)
            messages.append(placeholder_turn(self._template, calls_of(item)) if sampled else prepare(item))
        return messages, before is not Before.FIRST

    @once_property
    def reacts_to(self) -> tuple[str, ...]:
        """Texts that change later suffixes if a message after the first completion contains them."""
        single, pairs = _looked_for(self._template)
        # What the first messages say may decide whether the template looks at later ones.
        plain = self._suffixes("x", [()])
        firsts = ["x", *(words for words in single if self._suffixes(words, [()]) != plain)]
        found: dict[str, None] = {}
        for first in firsts:
            plain = self._suffixes(first, _middles("x"))
            found.update((words, None) for words in single if self._suffixes(first, _middles(words)) != plain)
            for start, end in pairs:
                if self._suffixes(first, _middles(f"{start}x{end}")) != plain:
                    found[start] = None
        return tuple(words for words in found if not any(part in words for part in found if part != words))

    @once_property
    def reacts_to_turns(self) -> tuple[str, ...]:
        """Texts that change suffixes if a turn before them contains them."""
        single, pairs = _looked_for(self._template)
        plain = self._suffixes("x", _said_by_model("x"), "x")
        texts = (*single, *(f"{start}x{end}" for start, end in pairs))
        return tuple(words for words in texts if _differ(plain, self._suffixes("x", _said_by_model(words), words)))

    @once_property
    def removes(self) -> tuple[str, ...]:
        """Texts that the template leaves out of the middle of messages: what is on their two sides is joined."""
        single, _ = _looked_for(self._template)
        conversations = []
        for words in single:
            said = [f"{each}{words}-rest" for each in _MARKS]
            user, turn = {"role": "user", "content": said[1]}, {"role": "assistant", "content": said[2]}
            messages = [user, turn, PLAIN[0], _CALLING, {**_RESULT, "content": said[3]}]
            conversations.append([[{"role": "system", "content": said[0]}, *messages], messages])
        texts = self._template.write_each(conversations)
        return tuple(
            words
            for words, text in zip(single, texts, strict=True)
            if text is not None and any(f"{each}-rest" in text for each in _MARKS)
        )

    @once_property
    def _later_texts(self) -> tuple[str, ...]:
        """Texts in messages that the model did not sample, and in names of calls, that change later suffixes."""
        return (*self.reacts_to, *self.reacts_to_turns)

    @once_property
    def _reads_everything(self) -> frozenset[bool]:
        """Whether suffixes of turns without calls, and with, depend on the number, kinds or lengths of messages."""
        short = [()] * len(_SHAPES)
        plain, found = self._suffixes("x", short), self._suffixes("x", _SHAPES)
        return frozenset(calls for calls in (False, True) if _differ(plain[calls::2], found[calls::2]))

    def _suffixes(self, first: str, middles: Iterable[Sequence[Mapping[str, Any]]], own: str = "") -> list[str | None]:
        """Suffixes of conversations of messages that say `first`, those of each middle, and a turn that says `own`.

        None where the template does not write the turn.
        """
        system, user = {"role": "system", "content": first}, {"role": "user", "content": first}
        turn = {"role": "assistant", "content": own + _MARKS[0]}
        conversations = []
        for middle in middles:
            for end in ((turn, _ASKING), _CALLED):
                rest = (user, *middle, *end)
                conversations.append([(system, *rest), rest])  # some templates take no system message
        texts = self._template.write_each(conversations)
        return [text.rpartition(_MARKS[0])[2] if text and _MARKS[0] in text else None for text in texts]


def _tried(render: Suffix, messages: Sequence[TemplateMessage] | None, tools: bool) -> RenderedText | None:
    try:
        return render(messages, tools)
    except TemplateError:
        return None


def _longer(template: ChatTemplate) -> Iterator[list[TemplateMessage]]:
    """Turns that make a conversation longer."""
    for turn, after in ((_SAYING, PLAIN[0]), (_CALLING, _RESULT)):
        yield [template.prepare(turn), template.prepare(after)]


def _differ(some: Sequence[str | None], others: Sequence[str | None]) -> bool:
    # A turn that the template rejects or does not write does not count: sampled turns are not rendered.
    return any(one != other and None not in (one, other) for one, other in zip(some, others, strict=True))


def _middles(words: str) -> Iterator[tuple[Mapping[str, Any], ...]]:
    said = {"role": "assistant", "content": "At noon."}
    yield (said, {"role": "user", "content": words}) * 3
    yield said, {"role": "system", "content": words}, {"role": "user", "content": "x"}
    yield _CALLING, {**_RESULT, "content": words}
    called = {**_CALLING, "tool_calls": [{**_CALL, "function": {"name": words, "arguments": {}}}]}
    yield called, {**_RESULT, "name": words}


def _said_by_model(words: str) -> Iterator[tuple[Mapping[str, Any], ...]]:
    user = {"role": "user", "content": "x"}
    yield {"role": "assistant", "content": words, "reasoning": words}, user
    yield {"role": "assistant", "content": "", "tool_calls": [_call({"query": words})]}, _RESULT, user


def _call(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {**_CALL, "function": {**_CALL["function"], "arguments": arguments}}


_SHAPES: Final = (*_middles("x"), *_middles("word " * 1000), next(_middles("y")) * 8)
"""Messages of several kinds, long ones, and many."""


def _contain(messages: Iterable[Mapping[str, Any]], looked_for: Sequence[str]) -> bool:
    if not looked_for:
        return False
    # A template may ignore case.
    lowered = [words.lower() for words in looked_for]
    texts = (text.lower() for item in messages for text in _texts(item))
    return any(words in text for text in texts for words in lowered)


def _texts(item: Mapping[str, Any]) -> Iterator[str]:
    content = item.get("content")
    yield item.get("reasoning") or ""
    yield item.get("name") or ""
    for call in item.get("tool_calls") or ():
        yield from (call["function"]["name"], str(call["function"].get("arguments", "")))
    if isinstance(content, str):
        yield content
    elif content:
        yield from (str(part.get("text", "")) for part in content)


def _placeholder_of(turn: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a placeholder shows of a sampled turn."""
    return {"tool_calls": [{"function": {"name": name}} for _, name in calls_of(turn)]}


def _looked_for(template: ChatTemplate) -> tuple[list[str], list[tuple[str, str]]]:
    """The string constants, and pairs of a beginning and an end."""
    environment = template.compiled.environment
    tree = optimize(environment.parse(template.source), environment)  # joins the parts of constants
    single = [text for node in tree.find_all(jinja.Const) for text in _constants(node.value)]
    ends: dict[str, list[str]] = {"startswith": [], "endswith": []}
    for node in tree.find_all(jinja.Call):
        if isinstance(node.node, jinja.Getattr) and node.node.attr in ends and node.args:
            ends[node.node.attr] += _constants(getattr(node.args[0], "value", None))
    return list(dict.fromkeys(single)), list(dict.fromkeys(product(ends["startswith"], ends["endswith"])))


def _constants(value: object) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [text for each in value for text in _constants(each)]
    return [value] if isinstance(value, str) and value.strip() and len(value) <= _LONGEST else []
