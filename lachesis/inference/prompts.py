"""The ids of prompts: every prompt of a conversation goes on from the very ids of the turns that were sampled before.

One invariant: sampled text is never encoded again. The prompt behind a sampled turn is its prompt, its sampled ids and
the ids of what follows; see `lachesis.inference.continuations` for how those are found with any chat template, and
`lachesis.inference.template_probe` for the proof that they are right.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias

import orjson

from lachesis.inference.chat_template import ChatTemplate, PromptError, TemplateRefused, Tools, TurnRefused
from lachesis.inference.continuations import behind, calls_of, generation_prompt_of
from lachesis.inference.probe_conversations import USUAL, Pattern
from lachesis.inference.template_probe import Extension, Finding, TemplateProbe
from lachesis.inference.text_encoder import TextEncoder
from lachesis.trajectories import ChatResponse, SampledTokens, TokenPrefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Prompt",
    "PromptBuilder",
    "PromptError",
    "PromptStart",
    "TemplateNotExtendable",
    "TemplateRefused",
    "TemplateVerdict",
    "TurnRefused",
    "WhenUnextendable",
]

_FIRST_KEPT: Final = 16
"""First prompts that are remembered: about as many items as are at work at a time."""

WhenUnextendable: TypeAlias = Literal["branch", "error"]
"""What becomes of a continuation that no stand-in can tell: render the whole conversation and start a branch, in which
earlier turns are context, or raise `TemplateNotExtendable`."""


class TemplateNotExtendable(PromptError):
    """What the template writes behind a turn depends on what stood before it, and the policy is "error"."""


class PromptStart(StrEnum):
    """What a prompt begins with."""

    ROOT = "root"
    """The conversation as the template renders it: nothing in it was sampled in its place, with this context."""
    EXTENDED = "extended"
    """The ids of the last turn that was sampled in its place."""
    BRANCH = "branch"
    """The conversation as the template renders it, because what follows a sampled turn cannot be told."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a completion is sampled after."""

    prefix: TokenPrefix
    """The ids, generation prompt included."""
    tail: str
    """The generation prompt, as text: where it opens reasoning, the completion begins inside of it. Empty where the
    template lets the model go on in its own turn."""
    start: PromptStart
    context: str
    """Digest for `SampledTokens.context`."""


class PromptNode(Protocol):
    """What prompts read of a `lachesis.trajectories.Node`."""

    @property
    def item(self) -> Mapping[str, Any]: ...
    @property
    def origin(self) -> Any: ...
    @property
    def sampled(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class TemplateVerdict:
    """How a template continues conversations, for the start of a run and its record."""

    template: str
    """Digest of its text."""
    findings: tuple[Finding, ...]
    shows_tools: bool
    when_unextendable: WhenUnextendable

    def describe(self) -> str:
        """A line for every kind of continuation."""
        lines = [f"chat template {self.template[:12]}{'' if self.shows_tools else ': does not show tools'}"]
        for finding in self.findings:
            notes = [difference.value for difference in finding.differences]
            notes += [finding.reason] if finding.reason else []
            if finding.extension is Extension.UNEXTENDABLE:
                notes.append(f"policy: {self.when_unextendable}")
            lines.append(f"  {finding.pattern}: {finding.extension}{' (' + '; '.join(notes) + ')' if notes else ''}")
        return "\n".join(lines)

    def to_record(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "template": self.template,
            "shows_tools": self.shows_tools,
            "when_unextendable": self.when_unextendable,
            "continuations": [finding.to_record() for finding in self.findings],
        }


class PromptBuilder:
    """Prompts for one tokenizer and one chat template; all rollouts of a run share it.

    Args:
        tokenizer: the model's, with its chat template. Of several named ones, the one for tools is used.
        chat_template: Jinja text instead of the tokenizer's own.
        template_kwargs: variables for the template, e.g. `{"enable_thinking": False}`.
        when_unextendable: see `WhenUnextendable`.
        end_of_turn: further ids that end a turn, such as those of a model's generation_config.json; the tokenizer's
            own end of sequence and what the template writes behind turns are known.

    Raises:
        TemplateRefused: there is no template, or it is no valid Jinja.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        when_unextendable: WhenUnextendable = "branch",
        end_of_turn: Sequence[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.when_unextendable: WhenUnextendable = when_unextendable
        source = chat_template or _template_of(tokenizer)
        self._template = ChatTemplate.load(source, {**tokenizer.special_tokens_map, **(template_kwargs or {})})
        self._encoder = TextEncoder(tokenizer)
        eos = tokenizer.eos_token_id
        known = [*(eos if isinstance(eos, list) else [] if eos is None else [eos]), *end_of_turn]
        self._known_ends = tuple(dict.fromkeys(known))
        seal = blake2b(digest_size=16)
        seal.update(json.dumps([source, dict(template_kwargs or {})], sort_keys=True, default=str).encode())
        seal.update(self._encoder.fingerprint())
        self._seal = seal
        self._first: dict[str, Sequence[int]] = {}

    # What a template does

    @cached_property
    def verdict(self) -> TemplateVerdict:
        """How the template continues conversations; proven when it is first asked for."""
        source = blake2b(self._template.source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        findings = tuple(self._probe.find(pattern) for pattern in USUAL)
        return TemplateVerdict(source, findings, self._probe.shows_tools(), self.when_unextendable)

    @cached_property
    def end_of_turn(self) -> tuple[int, ...]:
        """Ids that end a turn: the tokenizer's end of sequence, and the tokens that the template ends turns with.

        Where it writes another token into the history than behind the last turn, the latter ends turns. The other one
        may stand within: gpt-oss ends its reasoning with `<|end|>`, and goes on with the answer up to `<|return|>`.
        """
        seams = [finding.seam for finding in self.verdict.findings if finding.seam is not None]
        texts = [seam.sampled_end or seam.end for seam in seams]
        found = [self._encoder.added[text] for text in texts if text in self._encoder.added]
        return tuple(dict.fromkeys((*self._known_ends, *found)))

    @cached_property
    def _probe(self) -> TemplateProbe:
        ends = [self._text_of(token_id) for token_id in self._known_ends]
        return TemplateProbe(self._template, self._encoder.added.keys(), [text for text in ends if text])

    def context(self, tools: Tools | None) -> str:
        """Digest of what a prompt depends on besides its messages: template, variables, tokenizer and tools."""
        return self._context([dict(tool) for tool in tools] if tools else None)

    def _context(self, tools: list[dict[str, Any]] | None) -> str:
        seal = self._seal.copy()
        seal.update(_canonical(tools) if tools else b"")
        return seal.hexdigest()

    # Prompts

    def prompt(self, nodes: Sequence[PromptNode], tools: Tools | None = None) -> Prompt:
        """The prompt for the next turn of a conversation.

        `nodes` are the path of a `MessageHistory`. The prompt goes on from the deepest node that was sampled in its
        place with this context; copies of sampled turns behind it are put in as they were sampled, all other messages
        as the template writes them. Messages of the assistant at the end are closed: the next turn is a new one.

        Raises:
            TemplateRefused: the template raises for the conversation, or does not show the model a part of it.
            TemplateNotExtendable: see `when_unextendable`.
        """
        offered = [dict(tool) for tool in tools] if tools else None
        context = self._context(offered)
        cuts, anchor = _cuts(nodes, context)
        if not cuts:
            text, tail = self._whole(nodes, offered)
            return Prompt(TokenPrefix(self._first_ids(text)), tail, PromptStart.ROOT, context)
        ids: list[int] = []
        tail = ""
        if anchor is None:
            text, tail = self._whole(nodes[: cuts[0][0]], offered)
            ids = list(self._first_ids(text))
        for number, (index, tokens) in enumerate(cuts):
            if index != anchor:
                ids += [*self._forced(tokens, tail), *tokens.ids]
            end = cuts[number + 1][0] if number + 1 < len(cuts) else len(nodes)
            turn, following = nodes[index].item, [node.item for node in nodes[index + 1 : end]]
            finding = self._probe.find(Pattern.of(turn, following))
            found = self._follow(turn, tokens, following, finding, nodes[0], offered)
            if found is None:
                return self._branch(nodes, offered, context, finding)
            more, tail = found
            ids += more
        if anchor is None:
            return Prompt(TokenPrefix(ids), tail, PromptStart.ROOT, context)
        return Prompt(cuts[0][1].after.extend(ids), tail, PromptStart.EXTENDED, context)

    def encode(self, text: str) -> list[int]:
        """Ids of text that goes on from other text: no begin-of-sequence token, and no blank that nobody wrote."""
        return self._encoder.encode_behind(text)

    def _follow(
        self,
        turn: Mapping[str, Any],
        tokens: SampledTokens,
        following: Sequence[Mapping[str, Any]],
        finding: Finding,
        first: PromptNode,
        tools: Tools | None,
    ) -> tuple[list[int], str] | None:
        """Ids of what follows a sampled turn, and the generation prompt at their end; None where no stand-in tells.

        `first` is the first node of the conversation.
        """
        stand_in, seam = finding.stand_in, finding.seam
        if stand_in is None or seam is None:
            return None
        prepare = self._template.prepare
        system = first.item if stand_in.system else None
        text_behind = partial(
            behind,
            self._template,
            stand_in,
            [prepare(item) for item in following],
            calls=calls_of(turn),
            system=prepare(system) if system is not None and system.get("role") == "system" else None,
            tools=tools,
        )
        try:
            text = text_behind()
        except TemplateRefused:  # the whole conversation may yet be taken, or its message at fault be named
            return None
        last_id = tokens.ids[-1] if len(tokens) else None
        last = self._text_of(last_id) if last_id is not None else ""
        rest = seam.rest(text, last if last_id in self.end_of_turn else "", last) if text is not None else None
        if text is None or rest is None:
            return None
        tail = finding.tail
        if not text.endswith(tail):
            tail = generation_prompt_of(text, text_behind(generation_prompt=False) or "", self._encoder.added)
        return self._encoder.encode_behind(rest, last_id if last else None), tail

    def _text_of(self, token_id: int) -> str:
        """The text of an added token or of one that ends a sequence, "" for any other."""
        text = self._encoder.token(token_id)
        if not text and token_id in self._known_ends:
            text = str(self.tokenizer.convert_ids_to_tokens(token_id) or "")
        return text

    def _branch(self, nodes: Sequence[PromptNode], tools: Tools | None, context: str, finding: Finding) -> Prompt:
        """The whole conversation as the template renders it, behind what was sampled of the very same ids."""
        if finding.extension is Extension.OMITS:
            raise TemplateRefused(
                "the chat template",
                finding.reason,
                "give one that writes them as chat_template (lachesis/inference/templates)",
            )
        try:
            text, tail = self._whole(nodes, tools)
        except TemplateRefused as refused:
            if finding.extension is Extension.REFUSED and self._takes_one_call(finding.pattern):
                raise TurnRefused(*refused.args) from None
            raise
        if self.when_unextendable == "error":
            raise TemplateNotExtendable(
                "the chat template",
                f"{finding.pattern} cannot be extended: {finding.reason or 'no stand-in tells what follows'}",
                'set when_unextendable to "branch", or give another chat_template',
            )
        ids = self._encoder.encode(text)
        ancestors = [tokens for node in nodes if node.sampled and (tokens := _tokens(node, context)) is not None]
        begun = TokenPrefix()
        best: TokenPrefix | None = None
        for tokens in sorted(ancestors, key=lambda tokens: tokens.after.length):
            begun = begun.extend(ids[begun.length : tokens.after.length])
            if begun.length == tokens.after.length and begun.digest == tokens.after.digest:
                best = tokens.after
        prefix = TokenPrefix(ids) if best is None else best.extend(ids[best.length :])
        return Prompt(prefix, tail, PromptStart.BRANCH, context)

    def _takes_one_call(self, pattern: Pattern) -> bool:
        """Of several calls, whether it would have taken one."""
        if pattern.calls < 2:
            return False
        roles = tuple(role.removesuffix("+") for role in pattern.roles)
        return self._probe.find(Pattern(1, roles)).extension is not Extension.REFUSED

    def _whole(self, nodes: Sequence[PromptNode], tools: Tools | None) -> tuple[str, str]:
        """The conversation as the template renders it, and the generation prompt at its end."""
        if not nodes:
            raise PromptError("the prompt", "the conversation is empty", "give it at least one message")
        messages = [self._template.prepare(node.item) for node in nodes]
        text = self._template.render(messages, tools)
        without = self._template.render(messages, tools, generation_prompt=False)
        return text, generation_prompt_of(text, without, self._encoder.added)

    def _first_ids(self, text: str) -> Sequence[int]:
        """Ids of a whole conversation; those of the latest are remembered, for all rollouts of a group begin alike."""
        ids = self._first.get(text)
        if ids is None:
            while len(self._first) >= _FIRST_KEPT:
                self._first.pop(next(iter(self._first)), None)
            ids = self._first[text] = array("I", self._encoder.encode(text))
        return ids

    def _forced(self, tokens: SampledTokens, tail: str) -> list[int]:
        """Ids that stood between the generation prompt and the sampled ids, such as the opening of a forced call."""
        opening = self._encoder.encode_behind(tail)
        prompt = tokens.prompt
        if not opening or prompt.parent is None or prompt.own_ids[-len(opening) :] == opening:
            return []
        return prompt.own_ids if prompt.parent.own_ids[-len(opening) :] == opening else []


def _tokens(node: PromptNode, context: str) -> SampledTokens | None:
    """What a node was sampled as, if that was with this context."""
    tokens = node.origin.tokens if isinstance(node.origin, ChatResponse) else None
    return tokens if tokens is not None and tokens.context == context else None


def _cuts(nodes: Sequence[PromptNode], context: str) -> tuple[list[tuple[int, SampledTokens]], int | None]:
    """The turns that go into a prompt as they were sampled, and the position of the first if it stands in its place."""
    cuts: list[tuple[int, SampledTokens]] = []
    for index in range(len(nodes) - 1, -1, -1):
        if (tokens := _tokens(nodes[index], context)) is not None:
            cuts.append((index, tokens))
            if nodes[index].sampled:
                return cuts[::-1], index
    return cuts[::-1], None


def _template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    try:
        source = tokenizer.get_chat_template(None, tools=[{}])
    except (ValueError, AttributeError) as error:
        raise TemplateRefused(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}",
            "it has no chat template",
            "give one as chat_template; lachesis/inference/templates/hermes.jinja fits models that speak ChatML",
        ) from error
    return str(source)


def _canonical(tools: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        return orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # e.g. a number of more than 64 bits
        return json.dumps(tools, sort_keys=True).encode()
