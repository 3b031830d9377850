"""Checks a rollout's samples against the record that the fake model server keeps of every request."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

from lachesis_messages.tokens import MASKED, MASKED_LOGPROB
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_testing.fake_server.policies import Said
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder, WhenUnextendable
from lachesis_tokens.samples.samples import TokenSample, samples
from lachesis_tokens.samples.verification import verify, verify_records
from lachesis_tokens.server.token_server import TokenServer
from tool_call_parsers import ToolCallParser

Sampling: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Prompt ids, sampled ids and their logprobs."""


class Says:
    """A policy with a script: one entry a choice of the next request, the last one for all further requests."""

    def __init__(self) -> None:
        self.next: Sequence[Said] = ("Done.",)

    def __call__(self, ask: Ask) -> Said:
        return self.next[min(ask.index, len(self.next) - 1)]


class Stack:
    """A fake server, a token server in front of it, and the fake server's record of every request."""

    def __init__(self, fake: FakeServer, tokens: TokenServer, says: Says) -> None:
        self.fake, self.tokens, self.says = fake, tokens, says

    @property
    def prompts(self) -> PromptBuilder:
        return self.tokens.prompts

    @property
    def last_prompt(self) -> list[int]:
        """The ids of the last request."""
        call = self.fake.requests[-1].call
        assert call is not None
        return list(call.prompts[0])

    def text(self, ids: Iterable[int]) -> str:
        return str(self.fake.tokenizer.decode(list(ids), skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        return list(self.fake.tokenizer.encode(text, add_special_tokens=False))

    def sampled(self) -> Counter[Sampling]:
        """Everything that the server sampled and sent completely. What it aborted is one with what went on from it."""
        found: Counter[Sampling] = Counter()
        aborted: dict[tuple[int, ...], list[Sampling]] = {}
        for seen in self.fake.requests:
            if seen.state == "answered" and seen.call is not None:
                for made in seen.completions:
                    if made.ids:
                        prompt = tuple(seen.call.prompts[made.prompt])
                        ids, logprobs = tuple(made.ids), tuple(made.logprobs)
                        if begun := aborted.get(prompt):
                            prompt, before, earlier = begun.pop()
                            ids, logprobs = before + ids, earlier + logprobs
                        if made.finish_reason == "abort":
                            aborted.setdefault(prompt + ids, []).append((prompt, ids, logprobs))
                        else:
                            found[prompt, ids, logprobs] += 1
        for begun in aborted.values():
            found.update(begun)
        return found


@asynccontextmanager
async def stack(
    tokenizer: Any = None,
    *,
    parser: ToolCallParser | str = "hermes",
    kind: str = "vllm",
    when_unextendable: WhenUnextendable = "branch",
    prompts: PromptBuilder | None = None,
    policy: Callable[[Ask], Said] | None = None,
    **fake: Any,
) -> AsyncIterator[Stack]:
    """`async with stack(tokenizer) as world`: a fake server at the wire and a `TokenServer` that talks to it."""
    says = Says()
    async with FakeServer(policy or says, tokenizer=tokenizer, **fake) as server:
        builder = prompts or PromptBuilder(server.tokenizer, when_unextendable=when_unextendable)
        tokens = TokenServer([create_engine(kind, server.settings())], builder, parser)
        try:
            yield Stack(server, tokens, says)
        finally:
            await tokens.close()


def trained(found: Iterable[TokenSample]) -> Counter[Sampling]:
    """The trained parts of the samples, from their lists: prompt, ids and logprobs of every span."""
    return Counter(
        (tuple(sample.tokens[: span.start]), tuple(sample.tokens[span.start : span.end]), _told(sample, span))
        for sample in found
        for span in sample.spans
    )


def _told(sample: TokenSample, span: Any) -> tuple[float, ...]:
    return tuple(sample.logprobs[span.start : span.end])


def assert_exact(world: Stack, history: Any, *, verifies: bool = True) -> list[TokenSample]:
    """Every token that the server sampled is trained once, after exactly the prompt that the server received.

    `verifies` is False if the model did something that `verify` rejects, such as continuing after its end of turn.
    """
    found = samples(history, rollout_id="r", outcome="completed")
    sampled, delivered = world.sampled(), trained(found)
    assert not (missing := sampled - delivered), f"not delivered: {_shown(missing)}"
    assert not (wrong := delivered - sampled), f"trained twice, or after another prompt: {_shown(wrong)}"
    for sample in found:
        masks, logprobs = [MASKED] * len(sample.tokens), [MASKED_LOGPROB] * len(sample.tokens)
        for span in sample.spans:
            masks[span.start : span.end] = sample.tokens[span.start : span.end]
            logprobs[span.start : span.end] = sample.logprobs[span.start : span.end]
        assert sample.masks == masks and sample.logprobs == logprobs
        if verifies:
            assert not (reasons := verify(sample)), reasons
    count = sum(len(ids) * times for (_, ids, _), times in sampled.items())
    if count and verifies:
        totals = verify_records([sample.to_record() for sample in found])
        assert totals.ok, totals.problems
        assert (totals.sampled, totals.delivered, totals.duplicated, totals.wrong_prefix) == (count, count, 0, 0)
        assert abs(sum(sample.weight for sample in found) - 1) < 1e-9
    return found


def _shown(samplings: Counter[Sampling]) -> str:
    return "; ".join(f"{times} x {len(prompt)} + {list(ids)}" for (prompt, ids, _), times in _first(samplings.items()))


def _first(entries: Iterable[Any]) -> Iterator[Any]:
    yield from list(entries)[:3]
