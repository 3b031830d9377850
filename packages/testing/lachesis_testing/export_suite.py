"""The conformance suite of exports. A test module of an export is three lines:

from lachesis_testing.export_suite import ExportSuite

class TestPairs(ExportSuite):
    export = "my_package.pairs:preference_pairs"
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from lachesis_data.exports.exports import export_group, load_export, write_export
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.records.digests import certified
from lachesis_messages.records.export_lines import ExportLine, ExportTotals, LeftOutRollout
from lachesis_messages.records.groups import read_groups
from lachesis_messages.records.jsonl import JsonlWriter, read_lines
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import SampledTokens, TokenPrefix
from lachesis_tokens.samples.samples import samples


class ExportSuite:
    """Checks on `groups` that every export must pass. Run it with pytest."""

    export: str
    """A name, or `package.module:attribute`."""
    options: Mapping[str, Any] = {}
    groups: Sequence[Mapping[str, Any]] | None = None
    """Group records to try it on; None takes `example_groups()`."""

    def records(self) -> list[dict[str, Any]]:
        """A fresh copy of the groups."""
        return copy.deepcopy(list(map(dict, self.groups if self.groups is not None else example_groups())))

    def read(self, path: Path) -> list[Any]:
        """The contents of the written file; override it for an export that does not write JSON Lines."""
        return list(read_lines(path))

    def lines(self) -> list[ExportLine]:
        export = load_export(self.export, self.options)
        totals = ExportTotals()
        return [line for group in self.records() for line in export_group(export, group, totals)]

    def test_it_writes_something(self) -> None:
        assert self.lines(), "the export has no line for any of the groups"

    def test_every_line_is_a_json_object_that_reads_back_as_it_is(self) -> None:
        for line in self.lines():
            text = json.dumps(line.content, allow_nan=False)
            assert json.loads(text) == line.content, "a line holds a tuple, or a key that is not text"

    def test_the_same_groups_give_the_same_lines(self) -> None:
        assert self.lines() == self.lines()

    def test_the_groups_are_not_changed(self) -> None:
        groups, export = self.records(), load_export(self.export, self.options)
        for group in groups:
            list(export(group))
        assert groups == self.records(), "the export edits the record that it reads; copy what it changes"

    def test_every_rollout_is_in_a_line_or_left_out_with_a_reason(self) -> None:
        export = load_export(self.export, self.options)
        for group in self.records():
            found = list(export(group))
            written = {id_ for line in found if isinstance(line, ExportLine) for id_ in line.rollout_ids}
            left_out = [each.rollout_id for each in found if isinstance(each, LeftOutRollout)]
            assert all(each.reason.strip() for each in found if isinstance(each, LeftOutRollout)), "a reason is empty"
            assert len(left_out) == len(set(left_out)), "a rollout is left out twice"
            assert not written & set(left_out), "a rollout is in a line and left out"
            known = {rollout["rollout_id"] for rollout in group["rollouts"]}
            assert written | set(left_out) == known, "yield LeftOut(rollout_id, reason) for the others"

    def test_a_group_without_rollouts_has_no_lines(self) -> None:
        empty = {**self.records()[0], "rollouts": [], "scores": [], "messages": [], "samples": []}
        assert list(load_export(self.export, self.options)(empty)) == []

    def test_a_groups_file_becomes_a_file_of_the_same_lines(self, tmp_path: Path) -> None:
        with JsonlWriter(tmp_path / "groups.jsonl") as writer:
            for group in self.records():
                writer.write(group)
        export = load_export(self.export, self.options)
        totals = write_export(export, read_groups(tmp_path / "groups.jsonl"), tmp_path / "out.jsonl")
        expected = self.lines()
        assert self.read(tmp_path / "out.jsonl") == [line.content for line in expected]
        held = {(id_) for line in expected for id_ in line.rollout_ids}
        assert (totals.lines, totals.rollouts) == (len(expected), len(held) + totals.left_out.total())
        assert {path.name for path in tmp_path.iterdir()} == {"groups.jsonl", "out.jsonl"}


def example_groups() -> list[dict[str, Any]]:
    """Groups as `process` writes them: with and without token samples, and with rollouts that ended in every way."""
    good = [*_ASKED, {"role": "assistant", "content": "Sorted.", "reasoning": "That was easy."}]
    odd = [*_ASKED[:1], {"role": "assistant", "content": "<think>Why?</think> & </tool_call> \u2028 漢 \ud83d"}]
    broken = [*_ASKED[:1], {**_ASKED[1], "tool_calls": [_call("call_1", "{not json")]}, _ASKED[2], good[-1]]
    return [
        _group(
            "a-1", [_rollout(good, 1.0), _rollout(odd, 0.0), _rollout(good, 1.0), _rollout(_ASKED, None, "timeout")]
        ),
        _group("b-1", [_rollout(broken, 0.25), _rollout([], None, "infra_error")]),
        _group("c-1", [_rollout(good[:1], None, "model_error")]),
        _group("d-1", [_rollout(good, 1.0), _rollout(good[:1] + good[-1:], 0.5)], with_samples=True),
    ]


def _call(call_id: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "terminal", "arguments": arguments}}


_ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Sort the words."},
    {"role": "assistant", "content": None, "tool_calls": [_call("call_1", '{"command": "sort words"}')]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"output": "a\\nb", "exit_code": 0, "error": null}'},
]
_TERMINAL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
_NULLS = (
    *("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs", "generation_params", "group_overrides"),
    *("overrides", "images", "distill_token_ids", "distill_logprobs"),
)


def _group(item_key: str, rollouts: list[dict[str, Any]], *, with_samples: bool = False) -> dict[str, Any]:
    scored = [rollout for rollout in rollouts if rollout["reward"] is not None]
    for index, rollout in enumerate(rollouts):
        rollout |= {"rollout_id": f"{item_key}-{index}", "index": index}
    for place, rollout in enumerate(scored):
        rollout["place"] = place
    group = {
        "schema": "lachesis.group/1",
        "environment": "sort-words",
        "item_key": item_key,
        "item": {"words": "b a"},
        "model": "tiny",
        "timestamp": "2026-03-30T14:22:31.456789",
        "tools": [_TERMINAL],
        "scores": [rollout["reward"] for rollout in scored],
        "messages": [rollout.pop("messages") for rollout in scored],
        **dict.fromkeys(_NULLS),
        "samples": [_sample(rollout["rollout_id"]) for rollout in scored] if with_samples else [],
        "rollouts": rollouts,
        "run": "5d1f0c",
        "evaluation": False,
        "number": "abcd".index(item_key[0]),
    }
    return certified(group)


def _rollout(messages: Sequence[Mapping[str, Any]], reward: float | None, outcome: str = "completed") -> dict[str, Any]:
    turns = sum(message["role"] == "assistant" for message in messages)
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    numbers = count()
    counted = {"count": calls, "success": calls, "failure": 0}
    return {
        "place": None,
        "outcome": outcome,
        "reason": "" if outcome == "completed" else "an example",
        "completed": outcome == "completed",
        "reward": reward,
        "unscored_kind": "infra_error" if reward is None else "",
        "agent_fault": "",
        "traceback": None,
        "attempts": 1,
        "retried_after": [],
        "lost_completion_tokens": 0,
        "seconds": 1.5,
        "metrics": {},
        "turn_rewards": None if reward is None else [0.0] * (turns - 1) + [reward],
        "reward_calls": [],
        "calls": {},
        "turns": turns,
        "api_calls": turns,
        "prompt_tokens": 10,
        "cached_tokens": 0,
        "completion_tokens": 3,
        "uncounted_requests": 0,
        "message_turns": [next(numbers) if message["role"] == "assistant" else None for message in messages],
        "completions": {
            "finish_reasons": ["stop"] * turns,
            "models": [["tiny", None, turns]] if turns else [],
            "tokens": None,
            "seconds": [0.5] * turns,
            "usage": [[10, 3]] * turns,
            "versions": [],
            "replaced_attempts": [],
        },
        "seconds_in_model": 1.0,
        "seconds_in_tools": 0.25,
        "seconds_own": 1.25,
        "seconds_waiting": 0.25,
        "policy_versions": ["7", "8"],
        "interrupts": 1,
        "repaired_calls": [0, 1],
        "tool_calls": calls,
        "tool_stats": {"terminal": counted} if calls else {},
        "tool_errors": [],
        "discarded": [],
        "messages": [dict(message) for message in messages],
    }


def _sample(rollout_id: str) -> dict[str, Any]:
    """A token sample of one completion that `lachesis verify` accepts."""
    prompt, ids, logprobs = TokenPrefix([1, 2, 3]), [7, 8, 9], [-0.25, -0.5, 0.0]
    tokens = SampledTokens.sample(prompt, ids, logprobs, end_of_turn=(9,), completion_id=f"of-{rollout_id}")
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": "raw"}
    said = Message("assistant", "Sorted.")
    history = MessageHistory([{"role": "user", "content": "Sort the words."}])
    history.append(ChatResponse(said, FinishReason.STOP, model="tiny", sampling=sampling, tokens=tokens))
    (sample,) = samples(history, rollout_id=rollout_id, outcome="completed")
    return sample.to_record()
