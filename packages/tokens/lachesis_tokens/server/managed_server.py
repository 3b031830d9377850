"""Chat over token engines: messages in, a message out, and a record of every sampled token (Phase 2).

One invariant: the prompt of a turn that follows sampled ones is `previous prompt ids + sampled ids + ids of the new
messages`. Sampled text is never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, Unpack

from backends.text import without_lone_surrogates
from lachesis_client.affinity import Affinity
from lachesis_client.chat_options import ChatOptions, Split, Tools, check_arguments
from lachesis_client.parse_thread import LONG_IDS, LONG_TEXT, is_long, parse
from lachesis_client.sampling import SAMPLING_FIELDS, Sampling, read_sampling
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.replay import RoutedExperts
from lachesis_messages.responses import ChatResponse, Node, Usage
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.server.token_source import TokenSource

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from lachesis_tokens.server.conversation_index import ConversationIndex

_TEXT = "text"
"""The context of text completions. No chat prompt continues them."""


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A sample in Atropos' form: `masked_tokens` are its masks, and `metadata` has `finish_reason`."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class ManagedServer:
    """The model, as one rollout sees it. It keeps every completion of the rollout.

    A `MessageHistory` knows which of its messages were sampled in their place. A list of dicts, which environments
    written for Atropos pass, is compared with the earlier conversations; see `ConversationIndex`.
    """

    def __init__(self, server: TokenSource, *, affinity: Affinity | None = None) -> None:
        self.server = server
        self.affinity = affinity or Affinity()
        """The servers that have computed this rollout's prompts."""
        self._routed: dict[TokenPrefix, RoutedExperts | None] = {}
        """Of each of the first completions, by its last piece."""
        self._responses: list[ChatResponse] = []
        self._texts: list[str] = []
        """Prompt and completion of the first responses, as far as a text prompt was compared with them."""
        self._conversations: ConversationIndex | None = None
        """Of the calls with lists of dicts."""

    # Chat

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        split: Split = "train",
        **options: Unpack[ChatOptions],
    ) -> ChatResponse:
        """One completion with its tokens. Options that are None are off (see `Sampling`); `max_tokens` is the server's.

        `tool_choice` "none" leaves calls in the text. "required" or a named function puts the opening of a call into
        the prompt, so its tokens do not count as sampled. Raises the errors of `TokenEngine.generate`,
        `PromptBuilder.prompt` and `forced_opening`.
        """
        check_arguments(options, ChatOptions.__annotations__.keys(), "chat")
        tools, tool_choice, sampling = options.get("tools"), options.get("tool_choice"), self._sampling(options)
        responses = await self.chat_n(messages, 1, tools=tools, tool_choice=tool_choice, sampling=sampling, split=split)
        return responses[0]

    async def chat_n(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        n: int,
        *,
        sampling: Sampling,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        split: Split = "train",
    ) -> list[ChatResponse]:
        """`n` completions of one conversation."""
        options: dict[str, Any] = {"sampling": sampling, "tools": tools, "tool_choice": tool_choice, "split": split}
        if isinstance(messages, MessageHistory):
            return await self.continue_nodes(messages.nodes(), n, before=messages.record_prompt, **options)
        if (conversations := self._conversations) is None:
            from lachesis_tokens.server.conversation_index import ConversationIndex  # the agent loop has a history

            conversations = self._conversations = ConversationIndex()
        found = conversations.find(messages)
        responses = await self.continue_nodes(found.nodes, n, **options)
        conversations.add(found, responses)
        return responses

    async def continue_nodes(
        self,
        nodes: Sequence[Node],
        n: int,
        *,
        sampling: Sampling,
        tools: Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        split: Split = "train",
        before: Callable[[TokenPrefix], None] | None = None,
    ) -> list[ChatResponse]:
        """`n` completions of the conversation that these nodes are. `before` gets their prompt before it is sent."""
        prompts, reader = self.server.prompts, self.server.reader
        new = takewhile(lambda node: not node.sampled, reversed(nodes))
        prompt = await parse(is_long(*(node.item for node in new)), partial(prompts.prompt, nodes, tools))
        prefix, opened = prompt.prefix, reader.opens_reasoning(prompt.generation_prompt)
        forced: list[int] = []
        if tool_choice not in (None, "auto", "none"):
            from lachesis_tokens.templates.forced_calls import (
                forced_opening,  # the agent loop leaves the model the choice
            )

            opening = forced_opening(self.server.parser, tools, tool_choice, reasoning_is_open=opened)
            forced, opened = prompts.encode(opening), False
            prefix = prefix.extend(forced)
        if before is not None:
            before(prefix)
        generations = await self._generate(prefix, sampling, n, split)
        offered = tools if tools and tool_choice != "none" else None
        responses = []
        as_seen: dict[tuple[int, ...], TokenPrefix] = {(): prefix}
        for generation in generations:
            if (seen := as_seen.get(generation.image_tokens)) is None:
                from lachesis_tokens.prompts.prompt_images import expanded  # loaded with the prompt that has the images

                seen = as_seen[generation.image_tokens] = expanded(prefix, generation.image_tokens)
            said, stop = self._said(generation, sampling)
            ids = [*forced, *said]
            read = partial(reader.read, ids, offered, stop=stop, forced=len(forced), reasoning_is_open=opened)
            message, malformed = await parse(len(ids) > LONG_IDS, read)
            responses.append(self._response(message, malformed, seen, generation, prompt.context))
        self._responses += responses
        return responses

    # Calls of environments written for Atropos

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """`openai.types.chat.ChatCompletion` for OpenAI's keyword arguments, `n` included.

        Its messages and tool calls work as objects and as dicts. Raises `TypeError` for an argument that would have no
        effect.
        """
        from lachesis_tokens.server.openai_types import chat_completion

        check_arguments(kwargs, _CHAT_ARGUMENTS, "chat_completion")
        responses = await self.chat_n(
            kwargs["messages"],
            kwargs.get("n") or 1,
            sampling=self._sampling(kwargs),
            tools=kwargs.get("tools"),
            tool_choice=kwargs.get("tool_choice"),
            split=kwargs.get("split", "train"),
        )
        return chat_completion(responses)

    async def completion(self, **kwargs: Any) -> Completion:
        """`openai.types.Completion` for a text or token-id `prompt`.

        A text that begins with an earlier prompt and its completion continues from the tokens of that completion.
        """
        from lachesis_tokens.server.openai_types import completion

        check_arguments(kwargs, _COMPLETION_ARGUMENTS, "completion")
        n, split = kwargs.get("n") or 1, kwargs.get("split", "train")
        return completion(await self.continue_text(kwargs["prompt"], n, sampling=self._sampling(kwargs), split=split))

    async def continue_text(
        self, prompt: str | Sequence[int], n: int, *, sampling: Sampling, split: Split = "train"
    ) -> list[ChatResponse]:
        """`n` completions of a text or of token ids.

        A prompt that begins with an earlier prompt and its completion continues from the tokens of that completion.
        """
        prefix = await self._text_prefix(prompt)
        responses = []
        for generation in await self._generate(prefix, sampling, n, split):
            ids, stop = self._said(generation, sampling)
            text = self.server.reader.text(ids, stop=stop)
            responses.append(self._response(Message("assistant", text), (), prefix, generation, _TEXT))
        self._responses += responses
        return responses

    def get_state(self) -> dict[str, Any]:
        """`{"nodes": [SequenceNode, ...]}`: every sampled token, in the sequences that a trainer takes.

        Each sample is one node. Completions of one call with `n` keep the order of its choices, also if some of them
        were continued. A continued conversation is one node. Tokens that branches share are trained in one of them.
        """
        nodes = []
        for sample in sorted(samples(self), key=lambda sample: sample.spans[0].turn):
            span = sample.spans[-1]
            metadata = {"finish_reason": span.finish_reason, "weight": sample.weight, "turns": len(sample.spans)}
            text = self.server.reader.decode(sample.tokens)
            nodes.append(SequenceNode(text, sample.tokens, sample.masks, sample.logprobs, metadata))
        return {"nodes": nodes}

    def completions(self) -> tuple[ChatResponse, ...]:
        """All completions, in order."""
        return tuple(self._responses)

    def ended_on(self) -> tuple[ChatResponse, ...]:
        """All completions: a `ManagedServer` knows no main conversation, so it ended with the last one."""
        return self.completions()

    def replaced_attempts(self) -> tuple[ChatResponse, ...]:
        """None: it does not know why a prompt is sent again."""
        return ()

    def message_digests(self) -> dict[int, str]:
        """None: the caller has the conversations."""
        return {}

    def reset(self) -> None:
        """Forget all completions."""
        self._responses.clear()
        self._texts.clear()
        self._routed.clear()
        self._conversations = None

    # The parts of a request

    def _sampling(self, given: Mapping[str, Any]) -> Sampling:
        return read_sampling(given, default_max_tokens=self.server.max_tokens, settings=self.server.sampling)

    async def _generate(self, prefix: TokenPrefix, sampling: Sampling, n: int, split: Split) -> list[Generation]:
        known = self._known_experts(prefix) if self.server.routed_experts else None
        return await self.server.generate(
            prefix, sampling, n=n, split=split, affinity=self.affinity, known_experts=known
        )

    def _known_experts(self, prefix: TokenPrefix) -> RoutedExperts | None:
        """Those of the last completion in the prompt."""
        for response in self._responses[len(self._routed) :]:
            if response.tokens is not None:
                self._routed[response.tokens.after] = response.tokens.experts
        return next((known for piece in prefix.lineage() if (known := self._routed.get(piece)) is not None), None)

    def _said(self, generation: Generation, sampling: Sampling) -> tuple[Sequence[int], Sequence[str]]:
        """The ids before the end of the turn, and the stop texts of which one may have ended it instead."""
        ids, ends = generation.ids, self.server.prompts.end_of_turn
        count = len(ids)
        while count and ids[count - 1] in ends:
            count -= 1
        return (ids, sampling.stop) if count == len(ids) else (ids[:count], ())

    def _response(
        self,
        message: Message,
        malformed: tuple[str, ...],
        prefix: TokenPrefix,
        generation: Generation,
        context: str,
    ) -> ChatResponse:
        finish = generation.finish_reason
        if finish is FinishReason.STOP and message.tool_calls:
            finish = FinishReason.TOOL_CALLS  # OpenAI's finish reason for a turn that ends with calls
        last = self._responses[-1].sampling if self._responses else None
        return ChatResponse(
            message=message,
            finish_reason=finish,
            raw_finish_reason=generation.raw_finish_reason,
            model=generation.model,
            model_version=generation.model_version,
            usage=Usage(prefix.length, len(generation.ids), generation.cached_tokens),
            latency=generation.latency,
            attempts=generation.attempts,
            server=generation.server,
            # Equal turns share one record: thousands of rollouts are in memory.
            sampling=last if last is not None and last == generation.sampling else generation.sampling,
            malformed_calls=malformed,
            tokens=SampledTokens.sample(
                prefix,
                generation.ids,
                generation.logprobs,
                end_of_turn=self.server.prompts.end_of_turn,
                context=context,
                experts=generation.experts,
                sampling_mask=generation.sampling_mask,
                prompt_checked=generation.prompt_checked,
                versions=generation.versions,
                interrupts=generation.interrupts,
            ),
        )

    async def _text_prefix(self, prompt: str | Sequence[int]) -> TokenPrefix:
        sampled = [response.tokens for response in self._responses if response.tokens is not None]
        known = [tokens.after for tokens in sampled]
        if not isinstance(prompt, str):
            ids = list(prompt)
            begun = [after for after in known if after.length <= len(ids) and after.ids == ids[: after.length]]
            longest = max(begun, key=len, default=TokenPrefix())
            return longest.extend(ids[longest.length :]) if begun else TokenPrefix(ids)
        added = self.server.prompts.tokenizer("")["input_ids"]  # a begin-of-sequence token, which no text shows
        for tokens in sampled[len(self._texts) :]:
            ids = tokens.after.ids
            begins = tokens.context == _TEXT and ids[: len(added)] == added
            self._texts.append(self.server.reader.decode(ids[len(added) :] if begins else ids))
        found = [(len(text), after) for text, after in zip(self._texts, known, strict=True) if prompt.startswith(text)]
        if not found:
            encode = partial(self.server.prompts.tokenizer, without_lone_surrogates(prompt))
            return TokenPrefix((await parse(len(prompt) > LONG_TEXT, encode))["input_ids"])
        length = max(map(itemgetter(0), found))
        equal = [after for its_length, after in found if its_length == length]
        after = equal[0]
        if len(equal) > 1:  # answers with one text are continued one after the other
            continued = {piece for tokens in sampled for piece in tokens.prompt.lineage()}
            after = next((each for each in equal if each not in continued), after)
        encode_rest = partial(self.server.prompts.encode, prompt[length:])
        return after.extend(await parse(len(prompt) - length > LONG_TEXT, encode_rest))


_ARGUMENTS: Final = frozenset(
    {*SAMPLING_FIELDS, "extra_body", "n", "split"}
    | {"model", "timeout", "logprobs", "top_logprobs"}  # ignored: the settings decide, or they always apply
)
_CHAT_ARGUMENTS: Final = _ARGUMENTS | {"messages", "tools", "tool_choice"}
_COMPLETION_ARGUMENTS: Final = _ARGUMENTS | {"prompt"}
