"""Logs of Inspect: every rollout is a sample, what broke is an error and in no mean, results are those of the run."""

from __future__ import annotations

from pathlib import Path

from lachesis.cli import main
from lachesis_data.exports.exports import load_export
from lachesis_testing.export_suite import example_groups
from tests.support.eval_logs import evaluated, read_log, read_samples
from tests.support.small_envs import lines


async def test_an_evaluation_is_a_log_with_every_rollout_and_the_results_of_the_run(tmp_path: Path) -> None:
    path = await evaluated(tmp_path)
    log, eval_folder = read_log(path), tmp_path / "eval"
    groups = [*lines(eval_folder / "samples.jsonl"), *lines(eval_folder / "samples.failed.jsonl")]
    samples = {sample["uuid"]: sample for sample in read_samples(path)}
    assert len(samples) == len(groups) == 6
    for group in groups:
        (rollout,) = group["rollouts"]
        sample, shelf = samples[rollout["rollout_id"]], group["item"]["shelf"]
        assert log[f"samples/{sample['id']}_epoch_{rollout['index'] + 1}.json"] == sample
        assert sample["id"] == group["item_key"].partition("+")[0]
        assert sample["metadata"]["item"] == group["item"]
        assert (sample["input"], sample["target"]) == (f"Count {shelf}.", str(group["item"]["answer"]))
        if shelf == "east":
            assert (sample["scores"], sample["limit"]) == (None, None)
            assert sample["error"]["message"].endswith(rollout["reason"])
            assert [event["event"] for event in sample["events"]] == ["error"]
            continue
        assert sample["error"] is None
        values = {name: score["value"] for name, score in sample["scores"].items()}
        assert values == {"reward": rollout["reward"], **rollout["metrics"]}
        solved = shelf == "north"
        assert (values["reward"], values["reward/short"]) == (float(solved), 0.5)
        limit = None if solved else {"type": "turn", "limit": 2, "reason": rollout["reason"]}
        assert sample["limit"] == limit
        asked, called, result = sample["messages"][:3]
        (tool_call,) = called["tool_calls"]
        assert tool_call["arguments"] == {"shelf": "north" if solved else "cellar"}
        assert (asked["source"], called["source"], result["function"]) == ("input", "generate", "count")
        assert tool_call["id"] == result["tool_call_id"]
        assert ("error" in result) is not solved
        events = [event["event"] for event in sample["events"]]
        assert events == (["model", "tool", "model"] if solved else ["model", "tool"] * 2)
        assert sample["events"][2]["input_refs"] == [[0, 3]]
        assert sample["events_data"]["messages"] == sample["messages"]
        usage = sample["model_usage"]["scripted"]
        assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (20, 10, 30)
        if solved:
            reasoning, text = sample["messages"][-1]["content"]
            assert (reasoning["reasoning"], text["text"], sample["output"]["completion"]) == (
                "So.",
                "It is 12",
                "It is 12",
            )

    header, summaries = log["header.json"], log["summaries.json"]
    assert {"version", "eval", "plan"} == set(log["_journal/start.json"])
    assert header["eval"]["task"] == "shelves"
    assert (header["eval"]["model"], header["eval"]["run_id"]) == ("scripted", groups[0]["run"])
    assert (header["eval"]["config"]["epochs"], header["eval"]["config"]["turn_limit"]) == (2, 2)
    assert header["eval"]["metadata"]["environment"] == "shelves"
    assert (header["results"]["total_samples"], header["results"]["completed_samples"]) == (6, 4)
    (reward,) = (score for score in header["results"]["scores"] if score["name"] == "reward")
    found = {name: metric["value"] for name, metric in reward["metrics"].items()}
    assert found == {"mean": 0.5, "stderr": 0.5}, "of two items, one solved; the third has no score"
    assert (reward["scored_samples"], reward["unscored_samples"]) == (2, 1)
    reduced = {each["sample_id"]: each["value"] for each in log["reductions.json"][0]["samples"]}
    assert sorted(reduced.values()) == [0.0, 1.0]
    assert header["stats"]["model_usage"]["scripted"]["total_tokens"] == 4 * 30
    assert [(each["uuid"], each["limit"]) for each in summaries] == [
        (each["uuid"], each["limit"] and "turn") for each in samples.values()
    ]

    again = path.with_name("again.eval")
    assert main(["export", str(eval_folder), "--format", "inspect", "--out", str(again)]) == 0
    assert again.read_bytes() == path.read_bytes()


def test_what_inspect_cannot_hold_is_counted() -> None:
    group = example_groups()[1]
    group["messages"][0][0] = {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}
    group["messages"][0].insert(1, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:x"}}]})
    group["rollouts"][0] |= {"message_turns": None, "discarded": [{"edit": True}], "retried_after": ["a reset"]}
    broken, nothing = load_export("inspect")(group)
    assert broken.warnings == ("arguments_replaced", "branches_omitted", "part_omitted")
    audio, image, called = broken.content["messages"][:3]
    assert audio["content"] == [{"type": "text", "text": "[input_audio]"}]
    assert image["content"] == [{"type": "image", "image": "data:x"}]
    assert broken.content["input"] == [audio, image]
    assert called["tool_calls"][0]["parse_error"] == "no JSON object: {not json"
    assert broken.content["error_retries"][0]["message"] == "a reset"
    group["rollouts"][1]["unscored_kind"] = "declined"
    (_, declined) = load_export("inspect")({**group, "item_key": "b-2"})
    found = [(sample.content["scores"], bool(sample.content["error"])) for sample in (nothing, declined)]
    assert found == [(None, True), (None, False)], "a reward that is not given is no error"
    assert (nothing.content["messages"], nothing.content["input"]) == ([], '{"words": "b a"}')


def test_groups_of_one_item_have_different_epochs() -> None:
    group = example_groups()[3]
    export = load_export("inspect")
    found = [line.content for key in ("d-1", "d-1+1") for line in export({**group, "item_key": key})]
    assert [(sample["id"], sample["epoch"]) for sample in found] == [("d-1", 1), ("d-1", 2), ("d-1", 3), ("d-1", 4)]
