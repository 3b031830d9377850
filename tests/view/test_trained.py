"""What a trainer got in its steps is shown as the groups of a run, with what became of each sequence."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_tokens.prompts.model_folders import made_folder
from lachesis_train.curves.recorder import GroupRecord, SampleRecord, TrainingRecorder
from lachesis_train.trainer.checkpoints import Checkpoint
from lachesis_view import app as viewer
from lachesis_view.curves import curves
from lachesis_view.filters import Filter
from lachesis_view.html.rollout import rollout_view, title_of
from lachesis_view.index import Index
from lachesis_view.names import LINES
from lachesis_view.token_text import vocabulary_of
from lachesis_view.trained import as_group
from tests.support.trained_groups import decode, group_body, step, trained

ASKED = "add 1 and 1"
STOCK: dict[str, Any] = {
    "tokens": [[5, 6, 7, 8, 9], [5, 6, 7, 1, 1]],
    "masks": [[-100, 6, -100, 8, 9], [-100, -100, 7, 1, 1]],
    "inference_logprobs": [[1.0, -0.5, 1.0, -0.25, -0.75], [1.0, 1.0, -1.0, -1.0, -1.0]],
    "scores": [1.0, 0.0],
    "messages": [[{"role": "user", "content": {"odd": 1}, "tool_calls": [7]}, "no message"], []],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps: trained, without a signal, and of a stock environment; and one whose files are full."""
    root = tmp_path_factory.mktemp("trained")
    body = group_body("g+1", ASKED, ['{"a": 1}', "2"], [1.0, 0.0])
    with TrainingRecorder(root / "run", decode=decode) as recorder:
        body["group_overrides"] = {"group_id": "a+b"}
        recorder.step(step(0, [trained(body, drift=-0.1, staleness=2)]))
        recorder.step(step(1, [trained(body), trained(group_body("same", ASKED, ["1", "2"], [0.5, 0.5]))]))
        recorder.step(step(2, [GroupRecord(body=STOCK, samples=[SampleRecord(), SampleRecord(skipped="stale")])]))
    with TrainingRecorder(root / "full", rollouts_limit=4 * 2000) as recorder:
        recorder.step(step(0, [trained(group_body("long", ASKED * 400, ["1", "2"], [1.0, 0.0]))]))
    return root


@pytest.fixture
def index(root: Path, tmp_path: Path) -> Any:
    index = Index(root, tmp_path / "index.sqlite")
    index.refresh()
    yield index
    index.close()


def test_the_rollouts_of_steps_are_listed_and_filtered_as_those_of_other_runs(index: Index) -> None:
    full, run = sorted(index.runs(), key=lambda each: str(each["name"]))
    assert (run["name"], run["steps"], run["groups"], run["rollouts"], run["model"]) == ("run", 3, 4, 8, "run:3")
    assert (full["groups"], full["rollouts"], full["scored"], index.unread) == (1, 2, 2, 0)
    rows = index.rollouts(Filter(runs=("run",), sort="reward")).rows
    assert [row["reward"] for row in rows] == [0, 0, 0, 0.5, 0.5, 1, 1, 1]
    assert {row["number"] for row in rows} == {0, LINES, LINES + 1, 2 * LINES}
    assert {row["title"] for row in rows if row["number"] <= LINES} == {ASKED}
    assert {(row["number"], row["n"]) for row in rows if row["cause"] == "same_scores"} == {
        (LINES + 1, 0),
        (LINES + 1, 1),
    }
    assert index.rollouts(Filter(cause="stale")).total == 1 and index.rollouts(Filter(q="1 and")).total == 6
    assert not index.rollouts(Filter(tool_error=False)).total, "what a trainer does not know is not none"
    charts = {chart["title"]: chart["lines"] for chart in curves(index, ["run"], "groups")}
    assert "reward" in charts and not charts.keys() & {"seconds", "tool calls that succeed, share"}


async def test_why_a_rollout_was_not_trained_is_no_cause_of_its_outcome(
    root: Path, index: Index, tmp_path: Path
) -> None:
    charts = {chart["title"]: chart for chart in curves(index, ["run"], "groups")}
    lines = {line["label"]: line["y"] for line in charts["why not trained, share"]["lines"]}
    assert lines == {"same scores": [0, 0, 1, 0], "stale": [0, 0, 0, 0.5]} and charts["why not trained, share"]["share"]
    assert not charts.keys() & {"why unscored, share", "causes of scored rollouts, share"}
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}rollouts?run=run&min_reward=0.50") as answer:
            text = await answer.text()
        assert "not trained: same scores" in text and 'value="0.5"' in text
        assert ">run · step 1, group 1, rollout 0</a>" in text and str(LINES) not in re.sub("<[^>]*>", "", text)
        async with aiohttp.ClientSession() as session, session.get(f"{url}group/run/{LINES + 1}?min_turns=1") as answer:
            assert ">step 1, group 1</a>" in await answer.text()
    finally:
        await runner.cleanup()


async def test_a_training_run_names_its_environment_its_model_and_its_steps(tmp_path: Path) -> None:
    body = group_body("g", ASKED, ['{"a": 1}', "2"], [1.0, 0.0]) | {"group_overrides": {"environment": "ascii"}}
    with TrainingRecorder(tmp_path / "runs/run", decode=decode) as recorder:
        for at in (1, 2):
            recorder.step(step(at, [trained(body)]))
    (tmp_path / "runs/run/checkpoint.json").write_text(json.dumps({"settings": {"base_model": "tiny"}}))
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}run/run") as answer:
            assert '<span class="dim">training · ascii · tiny · 2 steps</span>' in await answer.text()
    finally:
        await runner.cleanup()
        index.close()


async def test_a_run_on_files_shows_its_loss_and_examples_and_no_figures_of_rollouts(tmp_path: Path) -> None:
    for name in ("files", "other"):
        with TrainingRecorder(tmp_path / "runs" / name) as recorder:
            for at in (1, 2):
                recorder.step(step(at, [], tokens=500, samples=6, loss={"loss": 3.0 - at}))
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    index.refresh()
    assert [chart["title"] for chart in curves(index, ["files"], "step")] == ["loss"]
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            for path in ("", "run/files?over=groups", "?runs=files,other"):
                async with session.get(url + path) as answer:
                    text = await answer.text()
                    assert answer.status == 200 and "training on files" in text, path
                    assert ("12</b><span>examples trained, from files" in text) == path.startswith("run/")
                    assert ("<p>Loss: 2.000 at step 1, 1.000 at step 2.</p>" in text) == path.startswith("run/"), path
                    assert ("loss 1<" in text) != path.startswith("run/"), path
                    assert ('data-over="step"' in text) == bool(path) and 'data-over="groups"' not in text
                    assert not re.search("no score|not counted|worst first|tokens sampled", text), path
    finally:
        await runner.cleanup()
        index.close()


def test_a_step_that_is_trained_again_replaces_what_it_showed(root: Path, tmp_path: Path) -> None:
    index = Index(root, tmp_path / "index.sqlite")
    path = root / "run/rollouts/step_00000.jsonl"
    before = path.read_bytes()
    index.refresh()
    try:
        with TrainingRecorder(root / "again") as recorder:
            recorder.step(step(0, [trained(group_body("new", ASKED, ["3", "4"], [0.25, 0.75]))]))
        (root / "again/rollouts/step_00000.jsonl").replace(path)
        index.refresh()
        rewards = [rollout["reward"] for rollout in index.group("run", 0)["rollouts"]]
        assert rewards == [0.25, 0.75] and index.rollouts(Filter(runs=("run",))).total == 8
    finally:
        path.write_bytes(before)
        index.close()


def test_a_rollout_whose_messages_were_not_sent_has_its_question_as_a_title_and_no_count_of_calls(index: Index) -> None:
    """What a trainer is sent without messages is decoded, with the tokens between them."""
    prompt = "<|im_start|>system\nCall one of these: <tool_call><|im_end|>\n<|im_start|>user\nHow many <b>?<|im_end|>\n"
    context = {"role": "context", "content": f"{prompt}<|im_start|>assistant\n"}
    assert title_of(None, [context]) == "How many <b>?"
    assert title_of(None, [{"role": "context", "content": ASKED}]) == ASKED
    assert {row["calls"] for row in index.rollouts(Filter(runs=("run",))).rows} >= {None, 1}


async def test_the_tokens_have_the_advantage_and_the_logprobs_of_the_trainer(root: Path, index: Index) -> None:
    runner, url = await viewer.serve(index, "127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:

            async def page(path: str) -> str:
                async with session.get(url + path) as answer:
                    assert answer.status == 200, path
                    return await answer.text()

            (line,) = map(json.loads, (root / "run/rollouts/step_00000.jsonl").read_text().splitlines())
            for n, training in enumerate(line["training"]):
                tokens = json.loads(await page(f"tokens/run/0/{n}/0"))
                assert tokens["ids"] == line["samples"][n]["tokens"]
                assert tokens["advantage"] == training["advantage"] == (0.5, -0.5)[n]
                assert (tokens["staleness"], tokens["skipped"], tokens["largest_advantage"]) == (2, None, 0.5)
                sampled = [at for at, mask in enumerate(line["samples"][n]["masks"]) if mask != -100]
                assert {at: p for at, p in enumerate(tokens["trainer_logprobs"]) if p is not None} == {
                    at: pytest.approx(-0.6) for at in sampled
                }
            same = json.loads(await page(f"tokens/run/{LINES + 1}/0/0"))
            assert same["advantage"] is None and same["skipped"] == "same_scores" and same["trainer_logprobs"] is None
            assert "not trained: same scores" in await page(f"rollout/run/{LINES + 1}/0")
            assert "#token-" in await page("rollout/run/0/0"), "the call is linked with its tokens"
            stock = json.loads(await page(f"tokens/run/{2 * LINES}/0/0"))
            assert [(each["kind"], each["start"], each["end"]) for each in stock["segments"]] == [
                *(("context", 0, 1), ("sampled", 1, 2), ("context", 2, 3), ("sampled", 3, 5))
            ]
            assert stock["logprobs"] == [None, -0.5, None, -0.25, -0.75]
            assert "no message" in await page(f"rollout/run/{2 * LINES}/0")
            assert "were too many for its step" in await page("rollout/full/0/1")
            for path in ("", "run/run", "curves?runs=run&over=time", "group/full/0"):
                await page(path)
            await asyncio.gather(*(page(f"group/run/{number}") for number in (0, LINES, LINES + 1, 2 * LINES)))
    finally:
        await runner.cleanup()


def test_a_training_run_has_the_settings_of_its_checkpoint_and_the_texts_of_its_model(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = made_folder("tiny")
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 1}}}))
    settings = {"base_model": "tiny", "training.learning_rate": 1e-5}
    shutil.copytree(root / "run", tmp_path / "runs" / "run")
    begun = Checkpoint(run_id="run", step=0, batch_id=0, instance=None, state="s", sampler=None, settings=settings)
    begun.write(tmp_path / "runs" / "run")
    index = Index(tmp_path / "runs", tmp_path / "index.sqlite")
    try:
        index.refresh()
        assert index.settings("run") == settings
        vocabulary = vocabulary_of(index.settings("run"))
        assert vocabulary is not None and vocabulary.decode([1, 0]) == "ba"
    finally:
        index.close()


def test_several_samples_of_a_rollout_are_one_rollout(root: Path) -> None:
    (line,) = map(json.loads, (root / "run/rollouts/step_00000.jsonl").read_text().splitlines())
    twice = {name: [each for each in line[name] for _ in range(2)] for name in ("samples", "training")}
    first, second, *_ = twice["samples"] = [dict(sample) for sample in twice["samples"]]
    first["discarded"] = True
    group = as_group({**line, **twice, "scores": [-3.0, 1.0, 0.0, 0.0]})
    assert [rollout["reward"] for rollout in group["rollouts"]] == [1.0, 0.0], "not that of a discarded attempt"
    assert [rollout["messages"][0]["content"] for rollout in group["rollouts"]] == [ASKED, ASKED]
    assert second["rollout_id"] == group["rollouts"][0]["rollout_id"] and len(group["samples"]) == 4


def test_what_was_sampled_and_not_kept_is_an_attempt_of_its_rollout(root: Path) -> None:
    (line,) = map(json.loads, (root / "run/rollouts/step_00000.jsonl").read_text().splitlines())
    assert [rollout["discarded"] for rollout in as_group(line)["rollouts"]] == [[], []]
    texts = [[[False, "<user>"], [True, "<tool_call>{broken"]], None]
    training = [{**each, "text": text} for each, text in zip(line["training"], texts, strict=True)]
    asked = [messages[:1] for messages in line["messages"]]
    first, second = as_group({**line, "messages": asked, "training": training})["rollouts"]
    (attempt,) = first["discarded"]
    assert attempt["messages"] == [{"role": "assistant", "content": "<tool_call>{broken"}] and second["discarded"] == []
    shown = rollout_view({"rollouts": [first]}, first)
    kinds = [(branch["kind"], len(branch["messages"])) for branch in shown["branches"]]
    assert kinds == [("conversation", 1), ("attempt", 1)]
