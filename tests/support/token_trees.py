"""Random trees of completions, as rollouts with edits, retries, n > 1 and sub-agents produce them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens, TokenPrefix

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For property tests: the time of an example depends on the machine."""
END = 9
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 64, "logprobs": "raw"}


def completion(
    prompt: TokenPrefix, ids: Sequence[int], logprobs: Iterable[float] | None = None, **more: Any
) -> ChatResponse:
    """A completion with these ids. Its text is unrelated, so that nobody can infer one from the other."""
    known = [-0.25 * (place + 1) for place in range(len(ids))] if logprobs is None else list(logprobs)
    return ChatResponse(
        Message("assistant", "the same text everywhere"),
        FinishReason.STOP,
        model=more.pop("model", "tiny"),
        sampling=more.pop("sampling", SAMPLING),
        tokens=SampledTokens.sample(
            prompt,
            ids,
            known,
            end_of_turn=(END,),
            prompt_checked=more.pop("prompt_checked", "ids"),
            versions=more.pop("versions", ()),
        ),
        **more,
    )


@dataclass
class Tree:
    """The queries of `samples` on a history, answered from lists."""

    recorded: list[ChatResponse] = field(default_factory=list)
    path: list[ChatResponse] = field(default_factory=list)
    replaced: list[ChatResponse] = field(default_factory=list)

    def completions(self) -> Sequence[ChatResponse]:
        return tuple(self.recorded)

    def ended_on(self) -> Iterator[ChatResponse]:
        return iter(self.path)

    def replaced_attempts(self) -> Sequence[ChatResponse]:
        return self.replaced

    def message_digests(self) -> dict[int, str]:
        return {}

    def sample(self, prompt: TokenPrefix, ids: Sequence[int], **more: Any) -> TokenPrefix:
        """Records a completion. Returns its node."""
        response = completion(prompt, ids, **more)
        self.recorded.append(response)
        assert response.tokens is not None
        return response.tokens.after


# Few ids, so that equal prefixes, equal answers and answers with common beginnings are frequent.
_words = st.integers(0, 3)
_observations = st.lists(_words, max_size=3)
_answers = st.tuples(st.lists(_words, max_size=3), st.booleans()).map(lambda pair: pair[0] + [END] * pair[1])
_logprobs = st.floats(min_value=-40, max_value=0.0)


@st.composite
def trees(draw: st.DrawFn, *, max_completions: int = 9) -> Tree:
    """At least one completion; possibly empty ones, several roots, one listed twice, and any of them as the head."""
    tree = Tree()
    afters: list[TokenPrefix] = []
    prompts: list[TokenPrefix] = []
    for _ in range(draw(st.integers(1, max_completions))):
        kind = draw(st.sampled_from(["root", "turn", "turn", "turn", "n > 1", "continued", "again"]))
        if kind == "again" and tree.recorded:
            tree.recorded.append(draw(st.sampled_from(tree.recorded)))
            continue
        if kind == "n > 1" and prompts:
            prompt = draw(st.sampled_from(prompts))
        elif kind == "continued" and afters:
            prompt = draw(st.sampled_from(afters))
        elif kind == "turn" and afters:
            prompt = draw(st.sampled_from(afters)).extend(draw(_observations))
        else:
            prompt = TokenPrefix(draw(_observations))
        ids = draw(_answers)
        if prompt.ids[-1:] == [END] == ids[:1]:
            ids = [0, *ids]  # a model that ends an ended turn, which verify() must reject
        logprobs = draw(st.lists(_logprobs, min_size=len(ids), max_size=len(ids)))
        prompts.append(prompt)
        afters.append(tree.sample(prompt, ids, logprobs=logprobs))
    if draw(st.booleans()):
        head = draw(st.sampled_from(tree.recorded))
        assert head.tokens is not None
        line = set(head.tokens.after.lineage())
        tree.path = [response for response in tree.recorded if response.tokens and response.tokens.after in line]
    return tree
