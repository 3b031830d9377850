"""Groups of a task with one tool call, as a trainer gets them: bytes are tokens, and all samples are verified."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason
from lachesis_messages.records.split_rollouts import SplitRollouts
from lachesis_messages.responses import ChatResponse, as_message
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_tokens.samples.advantages import rollout_advantages
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RolloutSamples,
    TrainingGroup,
    build_group,
)
from lachesis_tokens.samples.samples import samples
from lachesis_train.curves.recorder import GroupRecord, SampleRecord, StepRecord

END = 3
SAMPLING = {"temperature": 1.0, "max_tokens": 64, "logprobs": "raw"}


def decode(ids: Sequence[int]) -> str:
    return bytes(each for each in ids if each < 256).decode("utf-8", "replace").replace(chr(END), "<end>")


def group_body(
    name: str,
    question: str,
    answers: Sequence[str],
    scores: Sequence[float],
    *,
    version: str = "run:0",
    p: float = -0.5,
    repaired_calls: Sequence[tuple[int, int]] = (),
    split: SplitRollouts = SplitRollouts.FINAL,
    outcome: str = "completed",
) -> dict[str, Any]:
    """The body of a group with one completion a rollout, every token of which has logprob `p`.

    `repaired_calls`: of each rollout how many calls the parser repaired and how many it read; empty for none.
    """
    rollouts = []
    for at, (answer, score) in enumerate(zip(answers, scores, strict=True)):
        history = MessageHistory([{"role": "user", "content": question}])
        prompt = TokenPrefix(list(f"user: {question}\nassistant: ".encode()))
        ids = [*answer.encode(), END]
        tokens = SampledTokens.sample(
            prompt,
            ids,
            [p] * len(ids),
            end_of_turn=(END,),
            versions=((version, 0, len(ids)),),
            prompt_checked="ids",
        )
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": answer}}
        is_call = answer.startswith("{")
        message = as_message(
            {"role": "assistant", "content": None, "tool_calls": [call]}
            if is_call
            else {"role": "assistant", "content": answer},
            0,
        )
        reason = FinishReason.TOOL_CALLS if is_call else FinishReason.STOP
        history.append(ChatResponse(message, reason, sampling=SAMPLING, tokens=tokens))
        said = [{"role": "user", "content": question}, message.to_openai("reasoning")]
        found = samples(history, rollout_id=f"{name}-{at}", outcome=outcome)
        calls = repaired_calls[at] if repaired_calls else (0, 0)
        rollouts.append(RolloutSamples(f"{name}-{at}", score, found, said, repaired_calls=calls))
    settings = GroupSettings(len(rollouts), split_rollouts=split, ensure_scores_are_not_same=False)
    group = build_group(rollouts, settings)
    assert isinstance(group, TrainingGroup), group
    return json.loads(json.dumps(group.to_atropos(env_id=0)))  # type: ignore[no-any-return]


def trained(body: dict[str, Any], *, drift: float = 0.0, staleness: int = 0) -> GroupRecord:
    """The record of a group whose trainer's logprobs are larger by `drift`; equal scores are skipped."""
    if len(set(body["scores"])) == 1:
        return GroupRecord(body=body, skipped="same_scores", detail=f"all rewards are {body['scores'][0]:g}")
    records = []
    for masks, logprobs, advantage in zip(
        body["masks"], body["inference_logprobs"], rollout_advantages(body["scores"]), strict=True
    ):
        of_sampler = [p for mask, p in zip(masks, logprobs, strict=True) if mask != -100]
        records.append(
            SampleRecord(
                advantage=advantage or 0.0,
                sampler_logprobs=of_sampler,
                trainer_logprobs=[p + drift for p in of_sampler],
                staleness=staleness,
            )
        )
    return GroupRecord(body=body, samples=records)


def step(number: int, groups: Sequence[GroupRecord], **more: Any) -> StepRecord:
    return StepRecord(step=number, version=f"run:{number + 1}", batch_id=number, groups=groups, **more)
