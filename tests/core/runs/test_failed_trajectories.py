"""`failed_trajectories.jsonl`: every conversation with a completion that failed, whatever failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis_data.files.validation import validate_entry
from tests.support.scripted_server import call, say
from tests.support.small_envs import SortWords, asked_words, lines, process, sorts

BAD_JSON = call(("terminal", '{"command": "ls'))
INVENTED = call(("no_such_tool", {}))


async def played(folder: Path, policy: Any, **settings: Any) -> Any:
    chosen = {"group_size": 1, "total_steps": 1, "max_infra_retries": 0, **settings}
    result = await process(SortWords, folder, policy, **chosen)
    failed = lines(result.files.failed_samples) if result.files.failed_samples.exists() else []
    assert [problem for entry in failed for problem in validate_entry(entry)] == []
    return result, failed


@pytest.mark.parametrize(
    ("answers", "outcome", "last"),
    [
        ([BAD_JSON], "model_error", '<tool_call>\n{"name": "terminal", "arguments": {}}\n</tool_call>'),
        ([say("")], "model_error", "</think>"),
        ([say("<think>hm</think>")], "model_error", "<think>\nhm\n</think>"),
        ([INVENTED], "model_error", "There is no tool 'no_such_tool'"),
        ([say("half", finish_reason="length")], "context_exhausted", "half"),
        ([call(("terminal", {"command": "true"})), BAD_JSON], "model_error", "</tool_response>"),
    ],
)
async def test_a_conversation_without_a_usable_end_is_in_the_file(
    answers: list[Any], outcome: str, last: str, tmp_path: Path
) -> None:
    result, failed = await played(tmp_path, answers)
    assert [entry["outcome"] for entry in failed] == [outcome]
    assert failed[0]["completed"] is False
    assert last in failed[0]["conversations"][-1]["value"]
    assert [turn["from"] for turn in failed[0]["conversations"]][:2] == ["system", "human"]
    (record,) = lines(result.files.groups)
    assert failed[0]["rollout_id"] == record["rollouts"][0]["rollout_id"]


def breaks_in_its_second_turn(request: dict[str, Any]) -> Any:
    return 503 if request["messages"][-1]["role"] == "tool" else call(("terminal", {"command": "true"}))


async def test_what_the_infrastructure_broke_is_in_the_file_once_with_its_finished_turns(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="without a scored rollout"):
        await played(tmp_path, breaks_in_its_second_turn, max_failed_groups=1)
    path = tmp_path / "failed_trajectories.jsonl"
    (first,) = lines(path)
    assert (first["outcome"], first["reward"], first["completed"]) == ("infra_error", None, False)
    assert [turn["from"] for turn in first["conversations"]] == ["system", "human", "gpt", "tool"]
    path.unlink()  # as of a start that was killed before it wrote the line
    result, failed = await played(tmp_path, sorts)
    assert [entry["rollout_id"] for entry in failed] == [first["rollout_id"]]
    assert len(lines(result.files.samples)) == 1


async def test_a_run_whose_first_start_finished_nothing_keeps_its_files(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="without a scored rollout"):
        await played(tmp_path, breaks_in_its_second_turn, max_failed_groups=1)
    result, failed = await played(tmp_path, sorts)
    assert [entry["outcome"] for entry in failed] == ["infra_error"]
    assert result.files.samples == tmp_path / "trajectory_samples.jsonl"
    assert {entry["run"] for entry in (*failed, *lines(result.files.samples))} == {failed[0]["run"]}


async def test_of_a_group_that_is_played_again_only_what_did_not_complete_is_in_the_file(tmp_path: Path) -> None:
    class Fails(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            raise RuntimeError("no verdict")

    with pytest.raises(Exception, match="no verdict"):
        await process(Fails, tmp_path, sorts, group_size=1, total_steps=1, max_failed_groups=1)
    for name in ("trajectory_samples.jsonl", "failed_trajectories.jsonl"):
        assert not lines(tmp_path / name)


async def test_a_rollout_that_never_heard_an_answer_is_no_conversation(tmp_path: Path) -> None:
    def policy(request: dict[str, Any]) -> Any:
        return 400 if "apple" in asked_words(request) else sorts(request)

    await process(SortWords, tmp_path, policy, group_size=1, total_steps=2, max_infra_retries=0)
    path = tmp_path / "failed_trajectories.jsonl"
    assert not path.exists() or not lines(path)
