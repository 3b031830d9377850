"""ATIF, Harbor's interchange format of agent trajectories: one trajectory for each rollout.

The fields are those of ATIF 1.7, as `harbor.models.trajectories` of harbor 0.25.0 checks them. Token ids and logprobs
of a step are those of the completion that the record names for its message (`message_turns`), never found by text.
"""

from __future__ import annotations

import importlib.metadata
import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from lachesis_data.exports.chat_exports import valid_json
from lachesis_messages.images import image_urls
from lachesis_messages.markup import NotJson, load_arguments
from lachesis_messages.records.export_lines import BRANCHES_OMITTED, ExportLine, LeftOutRollout
from lachesis_messages.records.groups import (
    GroupRecord,
    RolloutRecord,
    message_turns,
    rollout_samples,
    stored_messages,
)
from lachesis_messages.records.sharegpt import WarningKind

SCHEMA = "ATIF-v1.7"

TokenIds: TypeAlias = Literal["all", "completions", "none"]
"""Which ids a step has. ATIF repeats the whole prompt in each, so `all` grows with the square of the turns."""

IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

_MESSAGE_KEYS = ("role", "content", "tool_calls", "tool_call_id", "reasoning", "name")
_PROVENANCE = ("run", "evaluation", "environment", "item_key")
_ENDING = ("outcome", "reason", "reward", "turn_rewards", "metrics", "policy_versions")


def atif(group: GroupRecord, *, token_ids: TokenIds = "all") -> Iterator[ExportLine | LeftOutRollout]:
    """A line for each rollout with messages, also for those that failed."""
    for rollout in group["rollouts"]:
        messages = stored_messages(group, rollout)
        if not messages:
            yield LeftOutRollout(rollout["rollout_id"], "no messages")
            continue
        warnings: set[str] = set()
        turns = message_turns(rollout, messages)
        content = valid_json(_trajectory(group, rollout, messages, turns, warnings), warnings)
        if token_ids != "none":
            _add_tokens(content, group, rollout, turns, warnings, prompts=token_ids == "all")
        yield ExportLine(content, (rollout["rollout_id"],), tuple(sorted(warnings)))


def _trajectory(
    group: GroupRecord,
    rollout: RolloutRecord,
    messages: Sequence[Mapping[str, Any]],
    turns: Sequence[int | None] | None,
    warnings: set[str],
) -> dict[str, Any]:
    steps = _steps(messages, turns, warnings)
    counts = {f"total_{name}": rollout.get(name) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
    incomplete = {name: rollout[name] for name in ("uncounted_requests", "lost_completion_tokens") if rollout.get(name)}
    if "uncounted_requests" in incomplete:  # the sums are then too small
        counts = {}
    return {
        "schema_version": SCHEMA,
        "session_id": rollout["rollout_id"],
        "trajectory_id": rollout["rollout_id"],
        "agent": {
            "name": "lachesis",
            "version": importlib.metadata.version("lachesis-core"),
            "model_name": group["model"],
            "tool_definitions": group["tools"],
        },
        "steps": steps,
        "final_metrics": {
            **{name: count for name, count in counts.items() if count is not None},
            "total_steps": len(steps),
            **({"extra": incomplete} if incomplete else {}),
        },
        "extra": {
            **{key: group[key] for key in _PROVENANCE if key in group},
            **{key: rollout[key] for key in _ENDING if key in rollout},
        },
    }


def _steps(
    messages: Sequence[Mapping[str, Any]], turns: Sequence[int | None] | None, warnings: set[str]
) -> list[dict[str, Any]]:
    """A step for each message but tool results, which belong to the step of their call."""
    steps: list[dict[str, Any]] = []
    calls: dict[str, dict[str, Any]] = {}
    for index, message in enumerate(messages):
        role, content = message["role"], _content(message.get("content"), warnings)
        if role == "tool":
            _add_result(steps, calls, message, content, warnings)
            continue
        step = {"source": "agent" if role == "assistant" else role, "message": content}
        if role == "assistant":
            if message.get("reasoning"):
                step["reasoning_content"] = message["reasoning"]
            if message.get("tool_calls"):
                step["tool_calls"] = [_tool_call(call, warnings) for call in message["tool_calls"]]
                calls |= {call["id"]: step for call in message["tool_calls"]}
            if turns is not None:
                step |= {"is_copied_context": True} if turns[index] is None else {"llm_call_count": 1}
        if further := {key: value for key, value in message.items() if key not in _MESSAGE_KEYS}:
            step["extra"] = further
        steps.append(step)
    return [{"step_id": number, **step} for number, step in enumerate(steps, 1)]


def _tool_call(call: Mapping[str, Any], warnings: set[str]) -> dict[str, Any]:
    function = call["function"]
    written = {"tool_call_id": call["id"], "function_name": function["name"]}
    text = function["arguments"]
    try:
        arguments = load_arguments(text) if text.strip() else None
    except NotJson:
        arguments = None
    if arguments is not None:
        return {**written, "arguments": arguments}
    warnings.add(WarningKind.ARGUMENTS_REPLACED)
    return {**written, "arguments": {}, "extra": {"arguments": text}}


def _add_result(
    steps: list[dict[str, Any]],
    calls: Mapping[str, dict[str, Any]],
    message: Mapping[str, Any],
    content: str | list[dict[str, Any]],
    warnings: set[str],
) -> None:
    call_id = message["tool_call_id"]
    step = calls.get(call_id)
    if step is not None:
        result = {"source_call_id": call_id, "content": content}
    else:  # a program may have sent it so
        warnings.add("result_without_call")
        result = {"content": content, "extra": {"tool_call_id": call_id}}
        step = {"source": "system", "message": ""}
        steps.append(step)
    step.setdefault("observation", {"results": []})["results"].append(result)


def _content(content: Any, warnings: set[str]) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    return [_part(part, warnings) for part in content]


def _part(part: Mapping[str, Any], warnings: set[str]) -> dict[str, Any]:
    if part.get("type") == "text":
        return {"type": "text", "text": part["text"]}
    for url in image_urls([part]):
        kind = _image_type(url) if isinstance(url, str) else None
        if kind in IMAGE_TYPES:
            return {"type": "image", "source": {"media_type": kind, "path": url}}
    warnings.add(WarningKind.PART_OMITTED)
    return {"type": "text", "text": f"[{part.get('type')}]"}


def _image_type(url: str) -> str | None:
    found = re.match(r"data:([\w/+.-]+)[;,]", url)
    return found[1] if found else mimetypes.guess_type(url)[0]


def _add_tokens(
    trajectory: dict[str, Any],
    group: GroupRecord,
    rollout: RolloutRecord,
    turns: Sequence[int | None] | None,
    warnings: set[str],
    *,
    prompts: bool,
) -> None:
    samples = rollout_samples(group, rollout)
    spans = {span["turn"]: (sample, span) for sample in samples for span in sample["spans"]}
    if spans and turns is None:
        warnings.add("token_ids_without_message")
        return
    sampled = [turn for turn in turns or () if turn is not None]
    steps = [step for step in trajectory["steps"] if step["source"] == "agent" and "is_copied_context" not in step]
    for step, turn in zip(steps, sampled, strict=True) if spans else ():
        if turn not in spans:
            warnings.add("completion_without_tokens")
            continue
        sample, span = spans.pop(turn)
        start, end = span["start"], span["end"]
        step["metrics"] = {
            "prompt_tokens": start,
            "completion_tokens": end - start,
            **({"prompt_token_ids": sample["tokens"][:start]} if prompts else {}),
            "completion_token_ids": sample["tokens"][start:end],
            "logprobs": sample["logprobs"][start:end],
            "extra": {key: span[key] for key in ("finish_reason", "sampling", "prompt_checked", "versions")},
        }
        if span["model"] not in (None, group["model"]):
            step["model_name"] = span["model"]
    if spans:
        warnings.add(BRANCHES_OMITTED)
        extra = trajectory["final_metrics"].setdefault("extra", {})
        extra["tokens_of_other_branches"] = sum(span["end"] - span["start"] for _, span in spans.values())
