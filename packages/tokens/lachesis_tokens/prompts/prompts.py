"""The ids of prompts. Every prompt of a conversation extends the ids of the turns that were sampled before.

One invariant: sampled text is never encoded again. The prompt after a sampled turn is that turn's prompt, its sampled
ids and the ids of the suffix. `lachesis_tokens.templates.suffix_template` finds the suffix with any chat template, and
`lachesis_tokens.templates.template_validator` validates it.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

import orjson

from backends.lazy import once_property
from lachesis_client.errors import PromptError, TemplateError, TurnRejected
from lachesis_messages.images import PlacedImage
from lachesis_messages.responses import ChatResponse, Node
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_tokens.prompts.text_encoder import TextEncoder
from lachesis_tokens.templates.chat_template import ChatTemplate, TemplateMessage, Tools
from lachesis_tokens.templates.content_dependence import ContentDependence
from lachesis_tokens.templates.special_tokens import RenderedText, SpecialTokens, SpecialTokensInText
from lachesis_tokens.templates.suffix_template import calls_of, generation_prompt_of, render_suffix
from lachesis_tokens.templates.template_cases import USUAL, Pattern
from lachesis_tokens.templates.template_report import Extension, Finding, TemplateReport, WhenUnextendable
from lachesis_tokens.templates.template_validator import TemplateValidator
from tool_call_parsers import Detection, detect_parser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lachesis_tokens.prompts.prompt_images import ImagePlaces

_FIRST_KEPT: Final = 16
"""First prompts in the cache: about as many as the items in progress."""


class TemplateNotExtendable(PromptError):
    """The suffix of a turn depends on the messages before it, and the policy is "error"."""


class PromptStart(StrEnum):
    """The beginning of a prompt."""

    ROOT = "root"
    """The template's rendering: no message was sampled in its place with this context."""
    EXTENDED = "extended"
    """The ids of the last turn that was sampled in its place."""
    BRANCH = "branch"
    """The template's rendering, because a sampled turn has no suffix template."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a completion."""

    prefix: TokenPrefix
    """The ids, generation prompt included."""
    generation_prompt: str
    """Its text. If it opens reasoning, the completion begins inside reasoning. Empty if the template lets the model
    continue its own turn."""
    start: PromptStart
    context: str
    """Digest for `SampledTokens.context`."""


class PromptBuilder:
    """Prompts for one tokenizer and one chat template; all rollouts of a run share it.

    Args:
        tokenizer: the model's, with its chat template. Of several named templates, the one for tools is used.
        chat_template: Jinja text that replaces the tokenizer's.
        template_kwargs: variables for the template, e.g. `{"enable_thinking": False}`.
        when_unextendable: see `WhenUnextendable`.
        end_of_turn: further ids that end a turn, such as those of a model's generation_config.json. The tokenizer's
            end of sequence and the template's ends of turns are known.
        special_tokens_in_text: see `SpecialTokensInText`.

    Raises:
        TemplateError: there is no template, or it is not valid Jinja.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        when_unextendable: WhenUnextendable = "branch",
        end_of_turn: Sequence[int] = (),
        special_tokens_in_text: SpecialTokensInText = "encode_as_text",
    ) -> None:
        self.tokenizer = tokenizer
        self.special_tokens_in_text: SpecialTokensInText = special_tokens_in_text
        self.when_unextendable: WhenUnextendable = when_unextendable
        source = chat_template or _template_of(tokenizer)
        self._template = ChatTemplate.load(source, {**tokenizer.special_tokens_map, **(template_kwargs or {})})
        self._encoder = TextEncoder(tokenizer)
        self._images = self._image_places()
        self._template = replace(self._template, takes_images=self._images is not None)
        eos = tokenizer.eos_token_id
        known = [*(eos if isinstance(eos, list) else [] if eos is None else [eos]), *end_of_turn]
        self._known_ends = tuple(dict.fromkeys(known))
        seal = blake2b(digest_size=16)
        seal.update(json.dumps([source, dict(template_kwargs or {})], sort_keys=True, default=str).encode())
        seal.update(self._encoder.fingerprint())
        self._seal = seal
        self._first_ids = lru_cache(maxsize=_FIRST_KEPT)(self._encode_first)
        """Ids of a whole conversation: the rollouts of a group begin alike."""

    @once_property
    def template_report(self) -> TemplateReport:
        """How the template continues conversations; validated on first use."""
        source = blake2b(self._template.source.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        findings = tuple(self._validator.find(pattern) for pattern in USUAL)
        shows_tools, reacts_to = self._validator.shows_tools(), self._contents.reacts_to
        return TemplateReport(source, findings, shows_tools, self.when_unextendable, reacts_to)

    @once_property
    def detection(self) -> Detection:
        """The parsers for the template, by the calls that it writes; detected on first use, in milliseconds."""
        return detect_parser(self._template.source, self.tokenizer.get_vocab(), render=self._template.write)

    @once_property
    def end_of_turn(self) -> tuple[int, ...]:
        """Ids that end a turn: the tokenizer's end of sequence, and the tokens with which the template ends turns.

        If the template ends the last turn with another token than earlier ones, only the former counts. The other token
        may occur inside a turn: gpt-oss ends its reasoning with `<|end|>` and its answer with `<|return|>`.
        """
        found = [finding.suffix_template for finding in self.template_report.findings if finding.suffix_template]
        texts = [each.sampled_end or each.end for each in found]
        ids = [self._encoder.added[text] for text in texts if text in self._encoder.added]
        return tuple(dict.fromkeys((*self._known_ends, *ids)))

    @once_property
    def _validator(self) -> TemplateValidator:
        ends = [self._text_of(token_id) for token_id in self._known_ends]
        return TemplateValidator(self._template, self._encoder.added.keys(), [text for text in ends if text])

    def context(self, tools: Tools | None) -> str:
        """Digest of everything but the messages that a prompt depends on: template, variables, tokenizer and tools."""
        return self._context([dict(tool) for tool in tools] if tools else None)

    def _context(self, tools: list[dict[str, Any]] | None) -> str:
        seal = self._seal.copy()
        seal.update(_canonical(tools) if tools else b"")
        return seal.hexdigest()

    @once_property
    def _special_tokens(self) -> SpecialTokens:
        never_text = {*self._encoder.special, *self._validator.headers()}
        if self._images is not None:
            never_text.add(self._images.text)
        return SpecialTokens(never_text, self.special_tokens_in_text, self._contents.removes)

    @once_property
    def _contents(self) -> ContentDependence:
        return ContentDependence(self._template)

    # Prompts

    def prompt(self, nodes: Sequence[Node], tools: Tools | None = None) -> Prompt:
        """The prompt for the next turn of a conversation.

        `nodes` are the path of a `MessageHistory`. The prompt extends the deepest node that was sampled in its place
        with this context. Later copies of sampled turns keep their sampled ids; the template writes all other messages.
        Assistant messages at the end are closed, so the next turn is a new one.

        Raises:
            TemplateError: the template raises for the conversation, or leaves out a part of it.
            TemplateNotExtendable: see `when_unextendable`.
        """
        offered = [dict(tool) for tool in tools] if tools else None
        context = self._context(offered)
        cuts, anchor = _cuts(nodes, context)
        if anchor is None:
            self._contents.notice(nodes[: cuts[0][0]] if cuts else nodes, context)
        if not cuts:
            rendered, generation_prompt = self._whole(nodes, offered)
            first = self._first_ids(rendered)
            prefix = self._extended(None, first, self._placed(first, nodes))
            return Prompt(prefix, generation_prompt, PromptStart.ROOT, context)
        ids: list[int] = []
        images: tuple[PlacedImage, ...] = ()
        begun = cuts[0][1].after if anchor is not None else None
        generation_prompt = ""
        if begun is None:
            rendered, generation_prompt = self._whole(nodes[: cuts[0][0]], offered)
            ids = list(self._first_ids(rendered))
            images = self._placed(ids, nodes[: cuts[0][0]])
        for number, (index, tokens) in enumerate(cuts):
            if index != anchor:
                ids += [*self._forced(tokens, generation_prompt), *tokens.ids]
            end = cuts[number + 1][0] if number + 1 < len(cuts) else len(nodes)
            turn, following = nodes[index].item, [node.item for node in nodes[index + 1 : end]]
            finding = self._validator.find(Pattern.of(turn, following))
            found = self._suffix(nodes, index, tokens, following, finding, offered, context)
            if found is None:
                return self._branch(nodes, offered, context, finding)
            suffix_ids, generation_prompt = found
            at = len(ids) + (0 if begun is None else begun.length)
            images += self._placed(suffix_ids, nodes[index + 1 : end], at)
            ids += suffix_ids
        start = PromptStart.ROOT if begun is None else PromptStart.EXTENDED
        return Prompt(self._extended(begun, ids, images), generation_prompt, start, context)

    @property
    def encoder(self) -> TextEncoder:
        """The encoder that turns text into ids."""
        return self._encoder

    def encode(self, text: str) -> list[int]:
        """Ids of text that follows other text: no begin-of-sequence token and no added blank."""
        return self._encoder.encode_after(text)

    def _suffix(
        self,
        nodes: Sequence[Node],
        index: int,
        tokens: SampledTokens,
        following: Sequence[Mapping[str, Any]],
        finding: Finding,
        tools: Tools | None,
        context: str,
    ) -> tuple[list[int], str] | None:
        """Ids of the suffix of the sampled turn at `index`, and the generation prompt at its end; None without a suffix
        template."""
        placeholder, suffix_template = finding.placeholder, finding.suffix_template
        if placeholder is None or suffix_template is None:
            return None
        prepare = self._prepare
        system = nodes[0].item if placeholder.system else None
        suffix_of_turn = partial(
            self._special_tokens.render,
            following=[prepare(item) for item in following],
            calls=calls_of(nodes[index].item),
            system=prepare(system) if system is not None and system.get("role") == "system" else None,
        )

        def suffix_after(
            before: Sequence[TemplateMessage] | None, with_tools: bool, *, add_generation_prompt: bool = True
        ) -> RenderedText | None:
            shown = placeholder._replace(tools=True) if with_tools else placeholder
            render = partial(render_suffix, self._template, shown, add_generation_prompt=add_generation_prompt)
            return suffix_of_turn(render, before=before, tools=tools if shown.tools else None)

        around = self._contents.messages_before(suffix_after, nodes, index, following, finding.pattern, context)
        if around is None:
            return None
        try:
            rendered = suffix_after(*around)
        except TemplateError:  # the whole conversation may still render, or raise with the name of the message
            return None
        if rendered is None:
            return None
        suffix = rendered.text
        last_id = tokens.ids[-1] if len(tokens) else None
        last = self._text_of(last_id) if last_id is not None else ""
        missing = suffix_template.missing(suffix, last if last_id in self.end_of_turn else "", last)
        if missing is None:
            return None
        generation_prompt = finding.generation_prompt
        if not suffix.endswith(generation_prompt):
            without = suffix_after(*around, add_generation_prompt=False) or RenderedText("")
            generation_prompt = generation_prompt_of(suffix, without.text, self._encoder.added)
        cuts = rendered.last(len(missing)).cuts if rendered.cuts else ()
        return self._encoder.encode_after(missing, last_id if last else None, cuts), generation_prompt

    def _prepare(self, item: Mapping[str, Any]) -> TemplateMessage:
        return self._special_tokens.joined(self._template.prepare(item))

    def _text_of(self, token_id: int) -> str:
        """The text of an added token or of one that ends a sequence, "" for any other."""
        text = self._encoder.token(token_id)
        if not text and token_id in self._known_ends:
            text = str(self.tokenizer.convert_ids_to_tokens(token_id) or "")
        return text

    def _branch(self, nodes: Sequence[Node], tools: Tools | None, context: str, finding: Finding) -> Prompt:
        """The template's rendering of the whole conversation. It extends sampled ids that it begins with."""
        if finding.extension is Extension.OMITS:
            raise TemplateError(
                "the chat template",
                finding.reason,
                "set chat_template to one that writes them (packages/tokens/lachesis_tokens/templates/files)",
            )
        try:
            rendered, generation_prompt = self._whole(nodes, tools)
        except TemplateError as error:
            if finding.extension is Extension.REJECTED and self._takes_one_call(finding.pattern):
                raise TurnRejected(*error.args) from None
            raise
        if self.when_unextendable == "error":
            reason = finding.reason or "its text after the turn depends on the content of earlier messages"
            raise TemplateNotExtendable(
                "the chat template",
                f"{finding.pattern} cannot be extended: {reason}",
                'set when_unextendable to "branch", or set another chat_template',
            )
        self._contents.notice(nodes, context)
        ids = self._encoder.encode(*rendered)
        ancestors = [tokens for node in nodes if node.sampled and (tokens := _tokens(node, context)) is not None]
        begun = TokenPrefix()
        best: TokenPrefix | None = None
        for tokens in sorted(ancestors, key=lambda tokens: tokens.after.length):
            begun = begun.extend(ids[begun.length : tokens.after.length])
            if begun.length == tokens.after.length and begun.digest == tokens.after.digest:
                best = tokens.after
        images = self._placed(ids, nodes)
        if best is not None:
            ids, images = ids[best.length :], tuple(image for image in images if image.start >= best.length)
        return Prompt(self._extended(best, ids, images), generation_prompt, PromptStart.BRANCH, context)

    def _extended(self, begun: TokenPrefix | None, ids: Sequence[int], images: tuple[PlacedImage, ...]) -> TokenPrefix:
        prefix = TokenPrefix(ids, begun, images)
        if prefix.images and self._images is not None:
            self._images.check(prefix)
        return prefix

    def _image_places(self) -> ImagePlaces | None:
        """Where the template writes images; None if it writes none, or not in Qwen-VL's shape."""
        ids = self._encoder.encode_after(self._template.image_text())
        if len(ids) != 3 or ids[1] in (ids[0], ids[2]) or not all(map(self._encoder.token, ids)):
            return None
        from lachesis_tokens.prompts.prompt_images import ImagePlaces

        return ImagePlaces(ids[1], self._encoder.token(ids[1]), self.special_tokens_in_text)

    def _placed(self, ids: Sequence[int], nodes: Sequence[Node], start: int = 0) -> tuple[PlacedImage, ...]:
        """The images of these messages. A template that writes none refuses them by name."""
        return () if self._images is None else self._images.placed(ids, nodes, start)

    def _takes_one_call(self, pattern: Pattern) -> bool:
        """Whether the template rejects several calls and supports one."""
        if pattern.calls < 2:
            return False
        roles = tuple(role.removesuffix("+") for role in pattern.roles)
        return self._validator.find(Pattern(1, roles)).extension is not Extension.REJECTED

    def _whole(self, nodes: Sequence[Node], tools: Tools | None) -> tuple[RenderedText, str]:
        """The template's rendering of the conversation, and the generation prompt at its end."""
        if not nodes:
            raise PromptError("the prompt", "the conversation is empty", "give it at least one message")
        messages = [self._prepare(node.item) for node in nodes]
        rendered = self._special_tokens.render(self._template.render, messages=messages, tools=tools)
        assert rendered is not None
        without = self._template.render(messages, tools, add_generation_prompt=False)
        return rendered, generation_prompt_of(rendered.text, without, self._encoder.added)

    def _encode_first(self, rendered: RenderedText) -> Sequence[int]:
        return array("I", self._encoder.encode(*rendered))

    def _forced(self, tokens: SampledTokens, generation_prompt: str) -> list[int]:
        """Ids between the generation prompt and the sampled ids, such as the opening of a forced call."""
        opening = self._encoder.encode_after(generation_prompt)
        prompt = tokens.prompt
        if not opening or prompt.parent is None or prompt.own_ids[-len(opening) :] == opening:
            return []
        return prompt.own_ids if prompt.parent.own_ids[-len(opening) :] == opening else []


def _tokens(node: Node, context: str) -> SampledTokens | None:
    """The sampled tokens of a node, if they were sampled with this context."""
    tokens = node.origin.tokens if isinstance(node.origin, ChatResponse) else None
    return tokens if tokens is not None and tokens.context == context else None


def _cuts(nodes: Sequence[Node], context: str) -> tuple[list[tuple[int, SampledTokens]], int | None]:
    """The turns whose sampled ids a prompt keeps, and the index of the first if it was sampled in its place."""
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
        raise TemplateError(
            f"tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__}",
            "it has no chat template",
            "set chat_template; packages/tokens/lachesis_tokens/templates/files/hermes.jinja fits ChatML models",
        ) from error
    return str(source)


def _canonical(tools: Sequence[Mapping[str, Any]]) -> bytes:
    try:
        return orjson.dumps(tools, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # e.g. a number of more than 64 bits
        return json.dumps(tools, sort_keys=True).encode()
