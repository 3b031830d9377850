"""Rows for TRL: one a rollout, cut from a verified sample; a rollout of several samples does not pass unnoticed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis import rollout_session
from lachesis.figures.repaired_calls import RepairedCalls
from lachesis.loop.outcome import Outcome
from lachesis.loop.result import AgentResult
from lachesis.loop.rollout import Rollout
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message, ToolCall
from lachesis_messages.responses import ChatResponse
from lachesis_messages.tokens import MASKED, TokenPrefix
from lachesis_tokens.samples.samples import TokenSample
from lachesis_train import BranchedRollout, RejectedRollout, SettingsDisagree
from lachesis_train.trainers.items import environment_of
from lachesis_train.trainers.rows import call_figures, count_calls, row_of
from lachesis_train.trl.items import DrawnKeys, parted
from tests.support.small_envs import SortWords, make
from tests.support.token_trees import completion

PROMPT = TokenPrefix([1, 2, 3])


def rollout_of(history: MessageHistory, reward: float | None = 1.0) -> Rollout:
    result = AgentResult(1, True, [], [], Outcome.COMPLETED, "", history)
    return Rollout("r1", "item-1", 0, Outcome.COMPLETED, "", reward, result)


def test_a_rollout_is_parted_before_its_first_sampled_message() -> None:
    """The prompt may be that of a session, and may have examples of answers."""
    given = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an example"}]
    history = MessageHistory([*given, {"role": "user", "content": "now you"}])
    history.append(completion(PROMPT, [4, 9]))
    result = rollout_of(history).result
    assert result is not None
    prompt, said = parted(result)
    assert [message["content"] for message in prompt] == ["hello", "an example", "now you"]
    assert [message["role"] for message in said] == ["assistant"]


async def test_a_prompt_that_only_a_session_knows_is_shown_as_that(tmp_path: Path) -> None:
    class InSession(SortWords):
        @asynccontextmanager
        async def session(self, item: Any) -> AsyncIterator[str]:
            yield "A game."

        def format_prompt(self, item: Any) -> str:
            return str(rollout_session().upper())

    class Broken(SortWords):
        def format_prompt(self, item: Any) -> str:
            raise KeyError("prompt")

    async def drawn(env_cls: Any) -> Any:
        env = make(env_cls, "http://127.0.0.1:9/v1", tmp_path)
        await env.setup()
        return await DrawnKeys(env).draw(1)

    assert (await drawn(InSession))[0]["prompt"][-1]["content"] == "(the session of each rollout writes it)"
    with pytest.raises(KeyError):
        await drawn(Broken)


def two_turns() -> MessageHistory:
    history = MessageHistory([{"role": "user", "content": "hello"}])
    first = completion(PROMPT, [4, 9])
    history.append(first)
    history.append({"role": "user", "content": "more"})
    assert first.tokens is not None
    history.append(completion(first.tokens.after.extend([5, 6]), [7, 8, 9]))
    return history


def edited() -> MessageHistory:
    """Its first answer, of four tokens, was taken back, and the conversation went on with another one."""
    history = MessageHistory([{"role": "user", "content": "hello"}])
    history.append(completion(PROMPT, [4, 4, 4, 9]))
    history.rewind(1, "edited")
    history.append(completion(PROMPT, [7, 9]))
    return history


def test_a_row_begins_with_the_first_sampled_token_and_masks_what_the_environment_wrote() -> None:
    row = row_of(rollout_of(two_turns(), 0.5), on_branches="error", padding=0)
    assert row.prompt_ids == [1, 2, 3]
    assert row.completion_ids == [4, 9, 5, 6, 7, 8, 9]
    assert row.env_mask == [1, 1, 0, 0, 1, 1, 1]
    assert row.logprobs == [-0.25, -0.5, 0.0, 0.0, -0.25, -0.5, -0.75]
    assert (row.reward, row.branches, row.undelivered) == (0.5, 1, 0)


def test_a_rollout_of_several_samples_is_refused_by_name_or_one_of_them_is_chosen_and_the_rest_counted() -> None:
    rollout = rollout_of(edited())
    with pytest.raises(BranchedRollout, match=r"rollout r1 of item item-1 has 2 samples.*on_branches='last'"):
        row_of(rollout, on_branches="error", padding=0)
    last, longest = (row_of(rollout, on_branches=each, padding=0) for each in ("last", "longest"))
    assert (last.completion_ids, last.branches, last.undelivered) == ([7, 9], 2, 4)
    assert (longest.completion_ids, longest.branches, longest.undelivered) == ([4, 4, 4, 9], 2, 2)


def test_a_discarded_attempt_is_no_branch_and_is_counted() -> None:
    history = MessageHistory([{"role": "user", "content": "hello"}])
    history.append(completion(PROMPT, [4, 4, 4, 9]))
    history.rewind(1, "no JSON", attempt=True)
    history.append(completion(PROMPT, [7, 9]))
    row = row_of(rollout_of(history), on_branches="error", padding=0)
    assert (row.completion_ids, row.branches, row.undelivered) == ([7, 9], 1, 4)


@pytest.mark.parametrize("history", [two_turns(), MessageHistory([{"role": "user", "content": "hello"}])])
def test_a_rollout_without_a_score_trains_nothing_and_is_not_zero(history: MessageHistory) -> None:
    row = row_of(rollout_of(history, None), on_branches="error", padding=0)
    assert row.reward is None
    assert len(row.completion_ids) == len(row.env_mask) == len(row.logprobs) > 0
    assert not any(row.env_mask)


def test_a_sample_that_was_changed_is_not_trained() -> None:
    rollout = rollout_of(two_turns())
    (sample,) = rollout.samples

    class Changed(Rollout):
        """Its samples have another token where one was sampled."""

        @property
        def samples(self) -> list[TokenSample]:
            at = sample.spans[0].start
            tokens = [*sample.tokens[:at], 5, *sample.tokens[at + 1 :]]
            masks = [token if mask != MASKED else MASKED for token, mask in zip(tokens, sample.masks, strict=True)]
            return [replace(sample, tokens=tokens, masks=masks)]

    fields: dict[str, Any] = {name: getattr(rollout, name) for name in Rollout.__slots__}
    with pytest.raises(RejectedRollout, match=r"rollout r1 of item item-1 cannot be trained \(unproven\)"):
        row_of(Changed(**fields), on_branches="error", padding=0)


def test_a_setting_that_does_not_exist_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match=r".*: unknown setting env.max_agent_turn; did you mean max_agent_turns"):
        environment_of(SortWords, {"max_agent_turn": 2})
    assert environment_of(SortWords, {"max_agent_turns": 2}).config.max_agent_turns == 2


@pytest.mark.parametrize(
    "chosen",
    [
        {"credit": "turn"},
        {"soft_length_limit": 900},
        {"item_sampling": "difficulty"},
        {"discarded_attempts": "rollout", "split_rollouts": "all"},
        {"discarded_attempts": -0.5, "split_rollouts": "all"},
    ],
)
def test_a_setting_that_a_trainer_would_not_carry_out_is_refused_by_name(chosen: dict[str, Any]) -> None:
    name, value = next(iter(chosen.items()))
    with pytest.raises(SettingsDisagree, match=rf"env\.{name} is {value}, which has no effect with this trainer"):
        environment_of(SortWords, chosen)


def test_without_torch_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.path_importer_cache.clear()\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more)\n"
        "from lachesis import HermesAgentBaseEnv; from lachesis_train import LachesisRollouts\n"
        "LachesisRollouts(HermesAgentBaseEnv, tokenizer=None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "LachesisError: training with TRL needs torch" in done.stderr
    assert 'pip install "lachesis-rl[trl]"' in done.stderr


def calling(status: str | None) -> Rollout:
    """A rollout with one call, of which the parser says this."""
    call = ToolCall("c1", "add", "{}", status=status)
    history = MessageHistory([{"role": "user", "content": "add"}])
    history.append(ChatResponse(Message("assistant", tool_calls=(call,)), FinishReason.TOOL_CALLS))
    return rollout_of(history)


def test_a_rising_share_of_repaired_calls_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    seen = RepairedCalls()
    for step in range(40):
        count_calls(seen, [calling("repaired" if step > 20 else "ok")] * 4, "sums")
    (warning,) = caplog.messages
    assert warning.startswith("sums: alarm: calls repaired by the parser: from 0.0%")


def test_a_rollout_has_the_share_of_its_repaired_calls_where_a_parser_of_ours_read_one() -> None:
    assert call_figures(calling("repaired")) == {"repaired_call_rate": 1.0}
    assert call_figures(calling("ok")) == call_figures(calling("unknown_tool")) == {"repaired_call_rate": 0.0}
    assert call_figures(calling(None)) == {}


def test_only_well_formed_calls_are_ok_calls() -> None:
    results = [calling(status).result for status in ("ok", None, "repaired", "unknown_tool")]
    assert [len(result.ok_calls) for result in results if result is not None] == [1, 1, 0, 0]
