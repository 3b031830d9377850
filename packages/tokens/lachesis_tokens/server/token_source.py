"""Several token engines that serve one model, as one source of tokens: requests, their checks, and interrupted ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from backends.errors import LachesisError
from backends.tasks import run_all
from lachesis_client.affinity import Affinity, Demand, Route
from lachesis_client.chat_options import Split
from lachesis_client.errors import BadResponse, ContextExhausted, InferenceError
from lachesis_client.parse_thread import LONG_IDS, parse
from lachesis_client.sampling import LogprobsKind, Sampling, recorded_fields, sampling_fields
from lachesis_client.token_tracker import TokenTracker
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.sampling_record import OTHER_FIELDS
from lachesis_messages.replay import RoutedExperts
from lachesis_messages.tokens import TokenPrefix
from lachesis_tokens.engines.base import REPLAY, Generation, TokenEngine
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.tokenizer_proof import TokenizerProof
from lachesis_tokens.prompts.vocabulary import Vocabulary
from lachesis_tokens.server.completion_reader import CompletionReader
from lachesis_tokens.server.replays import ReplayGuard
from lachesis_tokens.templates.parser_match import parser_for
from tool_call_parsers import ToolCallParser, get_parser

if TYPE_CHECKING:
    from lachesis_tokens.server.stop_texts import StopTexts

DEFAULT_MAX_TOKENS = 2048
"""Completion tokens of a call without `max_tokens`: Atropos' default. No server default ever applies."""


class SettingsDiffer(LachesisError, ValueError):
    """The servers of one model have different sampling settings. A rollout may use several of them."""


class TokenSource(TokenTracker[TokenEngine]):
    """Engines that serve one model, with its prompts and its parser; see `Balancer`.

    Args:
        engines: servers of the same model.
        prompts: the model's tokenizer and chat template.
        parser: reads tool calls and reasoning from a completion. A name gets a parser with the same tokenizer.
        max_tokens: completion tokens of a call that sets none.
        tokenizer: the name of the tokenizer, and the setting that named it, for messages.
        rows: see `Vocabulary`.

    Raises:
        SettingsDiffer: the engines' `extra_body` set different sampling parameters.
    """

    def __init__(
        self,
        engines: Sequence[TokenEngine],
        prompts: PromptBuilder,
        parser: ToolCallParser | str,
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        tokenizer: tuple[str, str] = ("", ""),
        rows: int | None = None,
        **balancing: float,
    ) -> None:
        super().__init__(engines, **balancing)
        self.sampling = _common_sampling(engines)
        """Sampling parameters of the engines' settings. The arguments of a call override them."""
        self.prompts = prompts
        if isinstance(parser, str):
            parser = parser_for(prompts, parser)
        self.parser = parser
        self.reader = CompletionReader(prompts.tokenizer, parser)
        self.max_tokens = max_tokens
        self.replays = ReplayGuard()
        self.tokenizer_proof = TokenizerProof(prompts.tokenizer, *tokenizer)
        self.vocabulary = Vocabulary(prompts.tokenizer, self.tokenizer_proof.described, rows)
        self._behind_stops = 0

    @property
    def routed_experts(self) -> bool:
        """Whether completions come with the experts of their tokens."""
        return self.servers[0].settings.routed_experts  # as in those of all others: see `_common_sampling`

    @property
    def logprobs(self) -> set[LogprobsKind]:
        """The kinds of logprobs of all engines."""
        return {engine.logprobs for engine in self.servers}

    def with_reasoning_in_text(self) -> Self:
        """The same servers, with messages that keep the reasoning in their text, as Atropos' servers give them."""
        other = copy(self)
        if isinstance(self.parser, ToolCallParser) and self.parser.reads_reasoning:
            other.parser = get_parser(self.parser.name, reasoning=None, tokenizer=self.parser.tokenizer)
            other.reader = CompletionReader(self.prompts.tokenizer, other.parser, reasoning_in_text=True)
            other.reader.strays = self.reader.strays
        return other

    async def generate(
        self,
        prompt: TokenPrefix,
        sampling: Sampling,
        *,
        n: int = 1,
        split: Split = "train",
        affinity: Affinity | None = None,
        known_experts: RoutedExperts | None = None,
    ) -> list[Generation]:
        """`n` completions of the prompt.

        Completions that their server aborted go on, at any of the servers; see `lachesis_tokens.server.interrupts`.
        `affinity` knows the servers that have its beginning in their caches. `known_experts` end with the last sampled
        token in it.
        """
        answers = await self._request(prompt, sampling, n, split, affinity, known_experts)
        if FinishReason.ABORT not in [answer.finish_reason for answer in answers]:
            return answers
        try:
            return await run_all(
                self._go_on(prompt, sampling, index, answers, split, affinity, known_experts)
                for index in range(len(answers))
            )
        except InferenceError as error:
            error.sampled = sum(len(answer.ids) for answer in answers)
            raise

    async def _go_on(
        self,
        prompt: TokenPrefix,
        sampling: Sampling,
        index: int,
        answers: list[Generation],
        split: Split,
        affinity: Affinity | None,
        known: RoutedExperts | None,
    ) -> Generation:
        """The whole completion that was begun as choice `index`. Keeps its place in `answers` up to date."""
        # Most runs meet no update of weights, and load nothing of this.
        from lachesis_tokens.engines.replay_fields import cut_replay
        from lachesis_tokens.prompts.prompt_images import expanded
        from lachesis_tokens.server.interrupts import Interrupted, Patience, joined

        begun = answers[index]
        prompt = expanded(prompt, begun.image_tokens)
        settings = self.servers[0].settings
        rules = Interrupted(sampling, settings.extra_body, self.prompts.end_of_turn, self.reader.decode)
        patience, before = Patience(settings.retry_deadline), 0
        while (begun := cut_replay(rules.kept(begun), prompt.length)).finish_reason is FinishReason.ABORT:
            if len(begun.ids) > before:
                patience.progress()
            else:
                await patience.pause(begun)
            before = len(begun.ids)
            prefix = prompt.extend(begun.ids) if before else prompt
            sampling = rules.rest(begun, index)
            try:
                [rest] = await self._request(prefix, sampling, 1, split, affinity, begun.experts or known)
            except ContextExhausted:
                if not before:
                    raise
                return replace(begun, finish_reason=FinishReason.LENGTH)
            prompt, begun = expanded(prompt, rest.image_tokens), joined(begun, rest)
            answers[index] = begun
        return begun

    async def _request(
        self,
        prompt: TokenPrefix,
        sampling: Sampling,
        n: int,
        split: Split,
        affinity: Affinity | None,
        known_experts: RoutedExperts | None,
    ) -> list[Generation]:
        """The answers of one request. Completions may be aborted."""
        prompt_ids = PromptIds(prompt)
        prompt_ids.known_experts = known_experts
        if prompt_ids.images:
            from lachesis_tokens.prompts.prompt_images import require_images

            require_images(self.servers)

        async def send(engine: TokenEngine, retries: int | None, route: Route) -> list[Generation]:
            prompt_ids.route = route
            answers = await engine.generate(prompt_ids, sampling, n=n, max_retries=retries)
            if self.replays.repeated(engine, prompt_ids, sampling, answers):
                answers = await self.replays.ask_again(engine, prompt_ids, sampling, answers, n=n, max_retries=retries)
            await self.tokenizer_proof.prove_again(engine)
            if len(answers) != n:
                raise BadResponse(engine.base_url, f"{n} completions were requested and {len(answers)} came")
            if prompt_ids.has_new_images and not all(answer.image_tokens or not answer.ids for answer in answers):
                raise BadResponse(engine.base_url, "the engine does not say how many tokens each image has")
            named = [answer if answer.server else replace(answer, server=engine.base_url) for answer in answers]
            stops = self._stops(sampling, engine.settings.extra_body)
            return [await self._sampled(prompt, stops, answer) for answer in named]

        demand = Demand(len(prompt_ids), self._expected.of(sampling.max_tokens, n), affinity)
        return await self._run(
            send, split, asked=lambda: prompt_ids.ids, demand=demand, sampled=lambda answer: len(answer.ids)
        )

    def _stops(self, sampling: Sampling, extra_body: Mapping[str, Any]) -> StopTexts | None:
        """The stops of a request; None where it has none, as in the agent loop."""
        if not sampling.stop and not {**extra_body, **sampling.extra}.get("stop_token_ids"):
            return None
        from lachesis_tokens.server.stop_texts import StopTexts

        return StopTexts.of(sampling, extra_body, self.reader.decode)

    async def _sampled(self, prompt: TokenPrefix, stops: StopTexts | None, answer: Generation) -> Generation:
        """The answer up to the token that completes a stop. Raises `BadResponse` for ids that no model can sample."""
        self.vocabulary.check(answer.server, answer.ids)
        if not stops:
            return answer
        cut = await parse(len(answer.ids) > LONG_IDS, partial(stops.cut, answer))
        if cut is answer or len(cut.ids) == len(answer.ids):
            return cut
        self._behind_stops += len(answer.ids) - len(cut.ids)
        if cut.experts is None and cut.sampling_mask is None:
            return cut
        from lachesis_tokens.engines.replay_fields import cut_replay
        from lachesis_tokens.prompts.prompt_images import expanded

        return cut_replay(cut, expanded(prompt, cut.image_tokens).length)

    def wandb_metrics(self, metrics: Mapping[str, float] | None = None) -> dict[str, float]:
        """Those of `Balancer`, and how many tokens came that have no place in a message.

        `server/tokens_after_stop` came after a stop text and belong to no completion. The others were sampled and stay:
        `server/padding_tokens` are ids beyond the tokenizer, `server/stray_special_tokens` special tokens of another
        purpose than their place, and ids that the tokenizer does not use.
        """
        strays = self.reader.strays.copy()
        padding = self.vocabulary.count_padding(strays.elements())
        counts = {
            "server/tokens_after_stop": self._behind_stops,
            "server/padding_tokens": padding,
            "server/stray_special_tokens": strays.total() - padding,
        }
        return super().wandb_metrics({**(metrics or {}), **{name: float(n) for name, n in counts.items() if n}})


def _common_sampling(engines: Sequence[TokenEngine]) -> dict[str, Any]:
    for name in REPLAY:
        if len({getattr(engine.settings, name) for engine in engines}) > 1:
            raise SettingsDiffer(f"openai.{name} is set for some servers of the model; set it for all or for none")
    # A name of an unknown field may be a proxy's, which only one server has: each completion records its own.
    first, *others = [
        {name: value for name, value in recorded_fields(engine.settings.extra_body).items() if name != OTHER_FIELDS}
        for engine in engines
    ]
    for engine, fields in zip(engines[1:], others, strict=True):
        for name in first.keys() | fields.keys():
            if first.get(name) != fields.get(name):
                raise SettingsDiffer(
                    f"openai.extra_body sets {name} to {first.get(name)!r} for {engines[0].base_url} and to "
                    f"{fields.get(name)!r} for {engine.base_url}; give all servers of a model the same"
                )
    return sampling_fields(engines[0].settings.extra_body)
