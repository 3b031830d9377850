"""Chat over token engines: messages in, a message out, and every sampled token on record (Phase 2).

One invariant: the prompt of a turn that follows sampled ones is `previous prompt ids + sampled ids + ids of the new
messages`. Sampled text is never encoded again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lachesis.inference import wire
from lachesis.inference.balancer import Split
from lachesis.inference.completion_reader import cut_at_stop
from lachesis.inference.conversations import Conversations
from lachesis.inference.engines.base import Generation, TokenEngine
from lachesis.inference.forced_calls import forced_opening
from lachesis.inference.sampling import Sampling, read_sampling
from lachesis.trajectories import (
    ChatResponse,
    FinishReason,
    Message,
    MessageHistory,
    SampledTokens,
    TokenPrefix,
    Usage,
    samples,
)

if TYPE_CHECKING:
    from openai.types import Completion
    from openai.types.chat import ChatCompletion

    from lachesis.inference.token_server import Answered, TokenServer

_TEXT = "text"
"""Context of completions that continue a text, which no chat prompt continues."""


@dataclass(frozen=True, slots=True)
class SequenceNode:
    """A sample in the words of Atropos: `masked_tokens` are its masks, and `metadata` has `finish_reason`."""

    full_text: str
    tokens: list[int]
    masked_tokens: list[int]
    logprobs: list[float]
    metadata: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class ManagedServer:
    """The model, as one rollout sees it. Keeps what was sampled through it, and nothing else.

    A `MessageHistory` says by itself which of its messages were sampled in their place. A list of dicts, as
    environments written for Atropos pass it, is compared with the conversations that were had here; see
    `Conversations`.
    """

    def __init__(self, server: TokenServer) -> None:
        self.server = server
        self._responses: list[ChatResponse] = []
        self._conversations = Conversations()
        self._near: TokenEngine | None = None

    # Chat

    async def chat(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        tools: wire.Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        split: Split = "train",
    ) -> ChatResponse:
        """One completion with its tokens. What is None is off (see `Sampling`); `max_tokens` is then the server's.

        `tool_choice` "none" leaves calls in the text; "required" or a named function put the opening of a call into
        the prompt, where it is no sampled token. Raises what `TokenEngine.generate`, `PromptBuilder.prompt` and
        `forced_opening` raise.
        """
        sampling = self._sampling(
            temperature=temperature, max_tokens=max_tokens, top_p=top_p, stop=stop, seed=seed, extra_body=extra_body
        )
        responses = await self.chat_n(messages, 1, tools=tools, tool_choice=tool_choice, sampling=sampling, split=split)
        return responses[0]

    async def chat_n(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        n: int,
        *,
        sampling: Sampling,
        tools: wire.Tools | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        split: Split = "train",
    ) -> list[ChatResponse]:
        """`n` completions of one conversation: siblings, each with tokens of its own."""
        prompts, reader = self.server.prompts, self.server.reader
        if isinstance(messages, MessageHistory):
            found, nodes = None, messages.nodes()
        else:
            found = self._conversations.find(messages)
            nodes = found.nodes
        prompt = prompts.prompt(nodes, tools)
        prefix, opened = prompt.prefix, reader.opens_reasoning(prompt.tail)
        forced: list[int] = []
        if opening := forced_opening(self.server.parser, tools, tool_choice, reasoning_is_open=opened):
            forced, opened = prompts.encode(opening), False
            prefix = prefix.extend(forced)
        if isinstance(messages, MessageHistory):
            messages.record_prompt(prefix)  # a prompt that was rendered anew shares no piece that would tell
        answered = await self._generate(prefix, sampling, n, split)
        offered = tools if tools and tool_choice != "none" else None
        responses = []
        for generation in answered.generated.generations:
            ids = [*forced, *self._without_end(generation.ids)]
            reading = reader.read(ids, offered, stop=sampling.stop, forced=len(forced), reasoning_is_open=opened)
            responses.append(self._response(reading, prefix, generation, answered, prompt.context))
        self._responses += responses
        if found is not None:
            self._conversations.add(found, responses)
        return responses

    # What environments written for Atropos call

    async def chat_completion(self, **kwargs: Any) -> ChatCompletion:
        """`openai.types.chat.ChatCompletion` for OpenAI's keyword arguments, `n` among them.

        Its messages and tool calls can be used as objects and as dicts. TypeError names an argument that would have no
        effect.
        """
        from lachesis.inference.openai_types import chat_completion

        known = _arguments(kwargs, _OF_CHAT, "chat_completion")
        responses = await self.chat_n(
            known["messages"],
            known.get("n") or 1,
            sampling=self._sampling(**known),
            tools=known.get("tools"),
            tool_choice=known.get("tool_choice"),
            split=known.get("split", "train"),
        )
        return chat_completion(responses)

    async def completion(self, **kwargs: Any) -> Completion:
        """`openai.types.Completion` for a text or token-id `prompt`.

        A text that begins with one that was completed here goes on from the very tokens of that completion.
        """
        from lachesis.inference.openai_types import completion

        known = _arguments(kwargs, _OF_COMPLETION, "completion")
        sampling = self._sampling(**known)
        prefix = self._text_prefix(known["prompt"])
        answered = await self._generate(prefix, sampling, known.get("n") or 1, known.get("split", "train"))
        responses = []
        for generation in answered.generated.generations:
            text = cut_at_stop(self.server.reader.decode(self._without_end(generation.ids)), sampling.stop)
            reading = wire.Reading(Message("assistant", text))
            responses.append(self._response(reading, prefix, generation, answered, _TEXT))
        self._responses += responses
        return completion(responses)

    def get_state(self) -> dict[str, Any]:
        """`{"nodes": [SequenceNode, ...]}`: what was sampled here, as the sequences that a trainer takes.

        One node a sample: the completions of one call with `n` in the order of its choices, also after some of them
        were gone on with. A conversation that went on is one node, and where it branched, what the branches share is
        trained in one of them.
        """
        nodes = []
        for sample in sorted(samples(self), key=lambda sample: sample.spans[0].turn):
            span = sample.spans[-1]
            metadata = {"finish_reason": span.finish_reason, "weight": sample.weight, "turns": len(sample.spans)}
            text = self.server.reader.decode(sample.tokens)
            nodes.append(SequenceNode(text, sample.tokens, sample.masks, sample.logprobs, metadata))
        return {"nodes": nodes}

    def completions(self) -> tuple[ChatResponse, ...]:
        """Everything that was sampled here, in order."""
        return tuple(self._responses)

    def responses(self) -> tuple[ChatResponse, ...]:
        """The completions of the main conversation: here none is."""
        return ()

    def reset(self) -> None:
        """Forget everything that was sampled here."""
        self._responses.clear()
        self._conversations = Conversations()

    # The parts of a request

    def _sampling(self, **given: Any) -> Sampling:
        return read_sampling(given, default_max_tokens=self.server.max_tokens, settings=self.server.sampling)

    async def _generate(self, prefix: TokenPrefix, sampling: Sampling, n: int, split: Split) -> Answered:
        answered = await self.server.generate(prefix, sampling, n=n, split=split, near=self._near)
        self._near = answered.engine
        return answered

    def _without_end(self, ids: Sequence[int]) -> Sequence[int]:
        return ids[:-1] if ids and ids[-1] in self.server.prompts.end_of_turn else ids

    def _response(
        self,
        reading: wire.Reading,
        prefix: TokenPrefix,
        generation: Generation,
        answered: Answered,
        context: str,
    ) -> ChatResponse:
        finish = generation.finish_reason
        if finish is FinishReason.STOP and reading.message.tool_calls:
            finish = FinishReason.TOOL_CALLS  # OpenAI's word for a turn that the model ended with calls
        generated = answered.generated
        last = self._responses[-1].sampling if self._responses else None
        # One record for all turns: thousands of rollouts are in memory.
        sampling = last if last is not None and last == generated.sampling else generated.sampling
        return ChatResponse(
            message=reading.message,
            finish_reason=finish,
            raw_finish_reason=generation.raw_finish_reason,
            model=generated.model,
            model_version=generation.model_version or generated.model_version,
            usage=Usage(prefix.length, len(generation.ids)),
            latency=answered.latency,
            attempts=answered.attempts,
            server=answered.engine.base_url,
            sampling=sampling,
            malformed_calls=reading.malformed_calls,
            tokens=SampledTokens.sample(
                prefix,
                generation.ids,
                generation.logprobs,
                end_of_turn=self.server.prompts.end_of_turn,
                context=context,
            ),
        )

    def _text_prefix(self, prompt: Any) -> TokenPrefix:
        if not isinstance(prompt, str):
            return TokenPrefix(prompt)
        best: tuple[int, TokenPrefix] | None = None
        for response in self._responses:
            assert response.tokens is not None
            text = self.server.reader.decode(response.tokens.after.ids)
            if prompt.startswith(text) and (best is None or len(text) > best[0]):
                best = len(text), response.tokens.after
        if best is None:
            return TokenPrefix(self.server.prompts.tokenizer(prompt)["input_ids"])
        return best[1].extend(self.server.prompts.encode(prompt[best[0] :]))


_OF_SAMPLING = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
    | {"max_tokens", "max_completion_tokens", "stop", "seed", "extra_body", "n", "split"}
)
_OF_CHAT = _OF_SAMPLING | {"messages", "tools", "tool_choice"}
_OF_COMPLETION = _OF_SAMPLING | {"prompt"}
_IGNORED = frozenset({"model", "timeout", "logprobs", "top_logprobs"})
"""What the settings decide, or what is always so."""


def _arguments(given: Mapping[str, Any], known: frozenset[str], call: str) -> dict[str, Any]:
    off = (None, False)
    unknown = sorted(name for name, value in given.items() if name not in known | _IGNORED and value not in off)
    if unknown:
        raise TypeError(f"{call}() does not take {', '.join(unknown)}; fields of the server go into extra_body")
    return {name: value for name, value in given.items() if name in known}
