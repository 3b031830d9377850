"""Lines of `rollouts/step_N.jsonl`, the trainer's data of a step, in the shape of the groups that runs write."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lachesis_messages.tokens import MASKED


def as_group(line: Mapping[str, Any]) -> dict[str, Any]:
    """The group of a line. What a trainer does not know is None, where a run's own record has it.

    The group has its `step`; a rollout has the `advantage` that the trainer gave it, and the reason if it `skipped` it;
    a sample the same under `training`, with staleness and the trainer's logprobs.
    """
    training = line["training"]
    ids = [each["rollout_id"] or str(at) for at, each in enumerate(training)]
    samples = [dict(sample) for sample in line["samples"]] or _stock_samples(line, ids)
    for sample, each in zip(samples, training, strict=False):
        sample["training"] = {
            name: each[name] for name in ("advantage", "staleness", "skipped", "detail", "trainer_logprobs")
        }
    conversations = line.get("messages") or []
    rollouts = []
    for number, rollout_id in enumerate(dict.fromkeys(ids)):
        places = [at for at, name in enumerate(ids) if name == rollout_id]
        own = [sample for sample in samples if sample["rollout_id"] == rollout_id]
        sent = [_message(each) for each in conversations[number]] if number < len(conversations) else []
        rollouts.append(_rollout(line, rollout_id, places, own, sent))
    return {
        "environment": "training",
        "step": line["step"],
        "model": line["version"],
        "item_key": f"step {line['step']}" + (f" · {line['group_id']}" if line["group_id"] else ""),
        "rollouts": rollouts,
        "samples": samples,
    }


def _rollout(
    line: Mapping[str, Any],
    rollout_id: str,
    places: Sequence[int],
    samples: Sequence[Mapping[str, Any]],
    sent: list[dict[str, Any]],
) -> dict[str, Any]:
    # A discarded attempt may have a score of its own.
    at = next((at for at, sample in zip(places, samples, strict=False) if not sample["discarded"]), places[0])
    training = line["training"][at]
    spelled = _spelled(line["training"][places[0]]["text"] or ())
    messages = sent or spelled
    scores = line["scores"] or ()
    score = scores[at] if at < len(scores) else None
    reason = training["detail"]
    if "shortened" in line:
        size = f"{line['shortened']:,} bytes were too many for its step: texts and tokens were not kept"
        reason = f"{reason}; {size}" if reason else size
    return {
        "rollout_id": rollout_id,
        "place": None,
        "outcome": training["outcome"] or "unknown",
        "completed": training["outcome"] == "completed",
        "reason": reason,
        "reward": float(score) if isinstance(score, int | float) else None,
        "advantage": None if training["skipped"] else training["advantage"],
        "skipped": training["skipped"],
        "metrics": {} if training["staleness"] is None else {"staleness": training["staleness"]},
        "messages": messages,
        "discarded": _not_kept(sent, spelled),
        "message_turns": _turns(messages, samples),
        "turns": sum(message["role"] == "assistant" for message in messages),
        "repaired_calls": training.get("repaired_calls") or (0, 0),
        "tool_calls": sum(len(message.get("tool_calls") or ()) for message in messages) if sent else None,
        "tool_stats": None,
        "tree": training.get("tree"),
        "completion_tokens": samples[0]["sampled"] if samples else (line.get("undelivered") or {}).get(rollout_id, 0),
        "seconds": None,
    }


def _turns(messages: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]]) -> list[int | None] | None:
    """For each message the number of its completion, where every answer of the conversation is one in the samples."""
    turns = sorted({span["turn"] for sample in samples if not sample["discarded"] for span in sample["spans"]})
    if len(turns) != sum(message["role"] == "assistant" for message in messages):
        return None
    rest = iter(turns)
    return [next(rest) if message["role"] == "assistant" else None for message in messages]


def _spelled(text: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """The decoded tokens as messages, where none were sent."""
    return [{"role": "assistant" if trained else "context", "content": part} for trained, part in text]


def _not_kept(sent: Sequence[Mapping[str, Any]], spelled: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was sampled for a conversation that has no answer, such as a call that could not be read."""
    if not sent or any(message["role"] == "assistant" for message in sent):
        return []
    answers = [part for part in spelled if part["role"] == "assistant"]
    return [
        {"reason": "an answer that was not kept", "at": len(sent), "attempt": True, "edit": False, "messages": [part]}
        for part in answers
    ]


def _message(message: Any) -> dict[str, Any]:
    """A message as the pages take it: stock environments send what they like."""
    if not isinstance(message, Mapping):
        return {"role": "unknown", "content": _text(message)}
    content = message.get("content")
    if not (isinstance(content, list) and all(isinstance(part, Mapping) for part in content)):
        content = _text(content or "")
    calls = []
    for call in message.get("tool_calls") or ():
        known = call if isinstance(call, Mapping) else {}
        function = known.get("function") or {"name": "unknown", "arguments": call}
        said = {"name": _text(function.get("name")), "arguments": _text(function.get("arguments"))}
        calls.append({"id": known.get("id"), "function": said})
    reasoning = _text(message.get("reasoning") or message.get("reasoning_content") or "")
    shown = {"role": _text(message.get("role")), "content": content, "tool_calls": calls, "reasoning": reasoning}
    return {**message, **shown}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _stock_samples(line: Mapping[str, Any], ids: Sequence[str]) -> list[dict[str, Any]]:
    """The sequences of a stock Atropos environment, which are not certified: a completion is what is trained at a
    stretch. None where there are no logprobs."""
    samples = []
    columns = (line.get(name) or () for name in ("tokens", "masks", "inference_logprobs"))
    for rollout_id, tokens, masks, logprobs in zip(ids, *columns, strict=False):
        trained = [mask != MASKED for mask in masks]
        ends = [at for at in range(len(trained) + 1) if (at and trained[at - 1]) != (at < len(trained) and trained[at])]
        spans = [
            {"turn": turn, "start": start, "end": end, "finish_reason": "unknown", "prompt_checked": "none"}
            for turn, (start, end) in enumerate(zip(ends[::2], ends[1::2], strict=True))
        ]
        samples.append(
            {
                "rollout_id": rollout_id,
                "index": 0,
                "count": 1,
                "sampled": sum(trained),
                "weight": 1.0,
                "outcome": "unknown",
                "end_of_turn": [],
                "discarded": False,
                "spans": spans,
                "tokens": tokens,
                "masks": masks,
                "logprobs": logprobs,
            }
        )
    return samples
