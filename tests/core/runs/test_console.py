"""What a run says: why rollouts have no score, whether starting again helps, how it goes, and what to do next."""

from __future__ import annotations

import asyncio
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console
from rich.table import Table
from rich.text import Text

from backends.text import counted
from lachesis.cli import main as lachesis
from lachesis.figures.running_figures import FEW, RunningFigures
from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import Rollout
from lachesis.runs import command_line as cli
from lachesis.runs import silence
from lachesis.runs.failures import REPEATS, RunStopped
from lachesis.runs.progress import Progress, Standing
from lachesis.runs.prose import print_table
from lachesis.runs.results import ShownResult, folded, print_result, program
from lachesis_client import RequestRejected
from lachesis_client.sampling import Sampling
from lachesis_testing.fake_server import FakeServer
from lachesis_tokens.engines.sglang import SGLangEngine
from lachesis_train.verbs.launch_training import main as launch_training
from tests.support.pictures import image
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import SortWords, does_nothing, make, process, rollouts, served, sorts


def shown(result: ShownResult, **console: Any) -> str:
    print_result(Console(file=(out := io.StringIO()), width=400, **console), result)
    return out.getvalue()


def flags(folder: Path, *others: str) -> list[str]:
    groups = str(folder / "groups.jsonl")
    small = ["--env.total_steps=1", "--env.group_size=2", "--env.enabled_toolsets=[file]"]
    return ["process", *small, "--env.data_path_to_save_groups", groups, *others]


# Why rollouts have no score.


@pytest.mark.parametrize(
    ("status", "message"), [(404, "The model `gpt` does not exist."), (400, "gpt is not a valid model ID")]
)
def test_a_name_that_the_server_rejects_is_answered_with_those_that_it_lists(
    status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rejects(_: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": message}}, status=status)

    with served(rejects) as server:
        named = ["--openai.base_url", server.base_url, "--openai.model_name", "gpt"]
        assert cli.main(SortWords, flags(tmp_path, *named)) == 2
    said = capsys.readouterr().err
    assert "the server lists scripted: set --openai.model_name (-m) to one of these (now 'gpt')" in said
    assert "start again" not in said


async def test_a_route_of_another_kind_of_server_is_named_with_the_settings_that_ask_for_it() -> None:
    async with FakeServer(absent=["/generate"]) as server, SGLangEngine(server.settings(max_retries=0)) as engine:
        assert await engine.check() == ["fake"]
        with pytest.raises(RequestRejected, match=r"no route /generate, set openai\.server_type and openai\.engine"):
            await engine.generate([1], Sampling(max_tokens=1))


def test_a_policy_that_raises_stands_with_its_line_and_count_under_one_group(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Careless(SortWords):
        def reference_policy(self) -> Any:
            def policy(messages: Sequence[Any], tools: Any) -> Any:
                return {}["answer"]

            return policy

    assert cli.main(Careless, flags(tmp_path, "--openai.model_name", "reference")) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "rollouts without a score: 2 x infra error" in said
    assert "KeyError: 'answer' (test_console.py, line" in said and "correct reference_policy" in said
    assert f"1 of the groups had no scored rollout; {REPEATS}" in said and "start again" not in said


async def test_a_reward_that_raises_is_explained_by_its_traceback_and_by_the_line_to_correct(tmp_path: Path) -> None:
    class Raising(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return {}["answer"]

    result = await process(Raising, tmp_path, does_nothing, total_steps=1)
    said = shown(result)
    assert re.search(r"^next +correct test_console\.py, line \d+, then the same command$", said, re.MULTILINE)
    assert "lachesis view" not in said and "KeyError" in said
    assert "because" not in dict(result.figures.rows(fresh=True)), "the run has printed the traceback"


async def test_failures_that_may_pass_are_counted_by_cause_and_starting_again_is_advised(tmp_path: Path) -> None:
    result = await process(SortWords, tmp_path, lambda _: 503, total_steps=1)
    (cause,) = result.figures.causes
    assert (cause.count, cause.kind, cause.may_pass) == (2, "model_server", True)
    said = shown(result)
    assert "2 x model server: server http://127.0.0.1" in said
    assert "1 of the groups had no scored rollout; start again to play them" in said


async def test_a_server_of_another_kind_is_no_reason_to_start_again(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match="3 groups in a row") as stopped:
        await process(
            SortWords, tmp_path, lambda _: web.json_response({"status": "ok"}), total_steps=5, max_num_workers=1
        )
    said = str(stopped.value)
    assert "6 x model server: server" in said and "check that base_url points to" in said
    assert REPEATS in said and "start again" not in said


def test_a_memory_limit_that_no_sandbox_starts_with_is_the_settings_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = flags(tmp_path, "--openai.model_name", "reference", "--env.terminal_memory=1")
    assert cli.main(WithPolicy, arguments) == 2
    assert "raise env.terminal_memory, in MiB (memory_bytes is 1048576)" in capsys.readouterr().err


def test_faults_that_differ_in_ids_are_counted_together_with_the_setting_of_the_limit() -> None:
    figures = RunningFigures()
    for number in range(2):
        sandbox = f"sandbox lachesis-{number}f55ccf5e8aa02 (environment=gsm8k, task_id=3f-{number})"
        fault = f"{sandbox} is gone: its executor died (SIGKILL), for want of memory (memory_bytes)"
        reason, outcome = "", Outcome.AGENT_FAULT
        figures.add("x", Rollout("a", "key", number, outcome, reason, 0.0, None, agent_fault=fault))
    assert [*figures.causes] == [] and len(figures.faults) == 1
    (line,) = figures.faults.lines()
    assert line.startswith("2 x agent's fault: sandbox lachesis-0f55ccf5e8aa02 is gone")
    assert line.endswith("memory_bytes is env.terminal_memory, in MiB)")


def test_the_mean_of_a_long_run_is_of_the_latest_items() -> None:
    figures = RunningFigures(window=2)
    for key, reward in (("a-1", 0.0), ("b-1", 1.0), ("c-1", 1.0)):
        figures.add("x", Rollout(key, key, 0, Outcome.COMPLETED, "", reward, None))
    mean = dict(figures.rows())["mean"]
    assert mean.startswith("1.000 [") and mean.endswith("(the latest 2 items)")


def test_figures_that_stand_side_by_side_while_a_run_plays_are_of_one_moment() -> None:
    figures = RunningFigures()
    for number in range(1, FEW + 3):
        figures.add("x", Rollout(f"{number}", f"{number}-1", 0, Outcome.COMPLETED, "", number % 2, None))
        rows = dict(figures.rows())
        taken = min(number, FEW)  # each time of few, so that it agrees with the count of the run
        assert (rows["mean"][:5], rows["outcomes"]) == (f"{(taken + 1) // 2 / taken:.3f}", f"completed {taken}")
    rows = dict(figures.rows(fresh=True))
    assert (rows["mean"][:5], rows["outcomes"]) == ("0.500", f"completed {FEW + 2}")
    figures.add("x", Rollout("c", "c-1", 0, Outcome.MODEL_ERROR, "", 0.0, None))
    rows = dict(figures.rows(fresh=True))
    figures.figures.outcomes[Outcome.COMPLETED.value] = 1_843
    assert dict(figures.rows(fresh=True))["outcomes"].startswith("completed 1,843, ")
    assert rows["outcomes"].endswith(", model error 1") and ", model error, " in rows["last"]


def of_context(_: dict[str, Any]) -> web.Response:
    error = {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}
    return web.json_response({"error": error}, status=400)


async def test_a_first_prompt_that_does_not_fit_is_a_settings_fault_and_no_zero(tmp_path: Path) -> None:
    def short(request: dict[str, Any]) -> Any:
        if "apple" in request["messages"][0]["content"]:
            return of_context(request)
        return of_context(request) if len(request["messages"]) > 1 else call(("write_file", {"path": "a"}))

    result = await process(SortWords, tmp_path, short, max_infra_retries=2)
    for rollout in rollouts(result.files.failures):
        assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 1)
        assert "--openai.context" in rollout["reason"] and "--env.max_token_length" in rollout["reason"]
    for rollout in rollouts(result.files.groups):
        assert (rollout["outcome"], rollout["reward"]) == ("context_exhausted", 0.0), "it filled up by itself"
    assert REPEATS in shown(result)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("groups", "answers", "code"), [(1, [], 2), (4, [], 2), (4, [sorts], 2), (4, [lambda _: 503], 1)]
)
def test_a_run_in_which_nothing_but_a_setting_was_wrong_ends_with_2(
    groups: int, answers: list[Any], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`answers` are those of the first requests; all others do not fit the context."""
    with served(lambda request: answers.pop()(request) if answers else of_context(request)) as server:
        named = ["--openai.base_url", server.base_url, "--openai.model_name", "scripted", "--openai.max_retries=0"]
        few = ["--env.group_size=1", "--env.max_infra_retries=0", f"--env.total_steps={groups}"]
        assert cli.main(SortWords, flags(tmp_path, *named, *few)) == code
    assert "--openai.context" in "".join(capsys.readouterr())


async def test_a_server_that_hangs_is_named_and_again_as_it_goes_on_and_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "SILENT_AFTER", 0.2)
    log = tmp_path / "console.txt"

    async def warned(times: int) -> None:
        while log.read_text().count("has answered nothing for") < times:
            env.console.file.flush()
            await asyncio.sleep(0.02)

    class Hangs(ScriptedServer):
        async def _models(self, request: Any) -> Any:
            await warned(2)
            return await super()._models(request)

    async def hangs(request: dict[str, Any]) -> Any:
        await warned(3)
        return sorts(request)

    async with Hangs(hangs) as server:
        env = make(SortWords, server, tmp_path, total_steps=1, group_size=1)
        url, result = server.base_url, await env.process_manager()
    assert result.summary.reward.mean == 1.0
    said = log.read_text()
    assert f"warning: the model server {url} has answered nothing for" in said
    assert "openai.timeout" in said and "what does its log say" in said


# URLs.

JUDGE = "--env.judge_server={base_url: 'localhost:8000/v1', model_name: m}"


@pytest.mark.parametrize(
    ("arguments", "corrected"),
    [
        (["process", "--openai.base_url", "127.0.0.1:8000/v1"], "http://127.0.0.1:8000/v1"),
        (["serve", "--env.rollout_server_url", "localhost:8000"], "http://localhost:8000"),
        (["evaluate", "--openai.base_url", "ws://localhost:8000/v1"], "http://localhost:8000/v1"),
        (["process", "--openai.base_url", "api.openai.com/v1"], "https://api.openai.com/v1"),
        (["process", "--openai.model_name", "reference", JUDGE], "http://localhost:8000/v1"),
        (["batch", "--base_url", "box:80/v1"], "http://box:80/v1"),
        (["train", "--openai.base_url", "box:80/v1"], "http://box:80/v1"),
        (["train", "--env.rollout_server_url", "//box:80"], "http://box:80"),
        (["engine"], "http://box:80"),
        (["compress"], "https://openrouter.ai/api/v1"),
    ],
)
def test_a_url_without_a_scheme_is_refused_with_the_one_that_was_meant(
    arguments: list[str],
    corrected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, *rest = arguments
    if command == "batch":
        file = tmp_path / "prompts.jsonl"
        file.write_text('{"prompt": "a"}\n')
        needed = ["--dataset_file", str(file), "--batch_size=1", "--run_name=a", "--model=m", "--output", str(tmp_path)]
        code = lachesis([command, *needed, *rest])
    elif command == "train":
        code = launch_training(["--training.base_model=m", "--training.num_steps=1", *rest])
    elif command == "engine":
        monkeypatch.setenv("TINKER_BASE_URL", "box:80")
        code = launch_training(["--training.base_model=m", "--training.num_steps=1"])
    elif command == "compress":
        (tmp_path / "c.yaml").write_text(json.dumps({"summarization": {"base_url": "openrouter.ai/api/v1"}}))
        code = lachesis(["compress", "--input", str(tmp_path / "c.yaml"), "--config", str(tmp_path / "c.yaml")])
    else:
        code = cli.main(WithPolicy, [command, *rest])
    assert code == 2
    said = capsys.readouterr().err
    assert f"write {corrected}" in said and "Traceback" not in said


class WithPolicy(SortWords):
    def reference_policy(self) -> Any:
        return lambda messages, tools: None


# How it goes, and the end.


class Few(SortWords):
    async def setup(self) -> None:
        self.items = iter([{"title": "three fruits", "words": "b a"}, {"title": "two\x1b[31m \ud800", "words": "d c"}])

    async def get_next_item(self) -> Any:
        return next(self.items)  # StopIteration at the end

    def format_prompt(self, item: Any) -> str:
        return SortWords.format_prompt(self, item["words"])

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return await SortWords.compute_reward(self, item["words"], result, ctx)


def test_the_next_step_names_the_program_by_its_path_where_it_is_not_on_the_search_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a folder/lachesis"
    monkeypatch.setenv("PATH", str(path.parent))
    monkeypatch.setattr(sys, "argv", [str(path)])
    assert program() == f"'{path}'"
    path.parent.mkdir()
    path.touch(0o755)
    assert program() == "lachesis"
    monkeypatch.setattr(sys, "argv", ["env.py"])
    assert program() == "lachesis"


async def test_a_run_shows_its_figures_links_its_files_and_says_what_to_do_next(tmp_path: Path) -> None:
    def half(request: dict[str, Any]) -> Any:
        return sorts(request) if "'b a'" in request["messages"][0]["content"] else does_nothing(request)

    async with ScriptedServer(half) as server:
        env = make(Few, server, tmp_path, total_steps=5, max_num_workers=1)
        env.console = Console(file=(out := io.StringIO()), width=160, force_terminal=True)
        result = await env.process_manager()
    figures = out.getvalue()
    for text in (
        "groups 2/5",
        "4 rollouts",
        "0.500 [",
        "completed 4",
        "tool calls",
        "two [31m: reward 0.00, completed",
    ):
        assert text in figures, text
    said = shown(result)
    assert "the items ran out: get_next_item gave 2 of the 5 that env.total_steps requests" in said
    assert f"lachesis view {tmp_path}" in said and "lachesis export" in said and "lachesis train --sft" in said
    assert f"\ngroups        {result.files.groups}\n" in said, "a plain path where there is no terminal"
    linked = shown(result, force_terminal=True, color_system="standard")
    assert f";{result.files.report.as_uri()}\x1b\\" in linked and "\x1b]8;" in linked


async def test_trajectories_that_have_lost_their_images_are_counted_and_not_suggested(tmp_path: Path) -> None:
    class Seeing(SortWords):
        def format_prompt(self, item: Any) -> Any:
            return [{"type": "text", "text": super().format_prompt(item)}, image(2, 2)]

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return 1.0

    result = await process(Seeing, tmp_path, does_nothing, total_steps=2)
    said = shown(result)
    assert re.search(r"images +\d trajectories have only their types \(\[image_url\]\), so SFT refuses them", said)
    assert "lachesis export" in said and "--sft" not in said


async def test_equal_rewards_and_an_evaluation_with_too_few_items_are_said(tmp_path: Path) -> None:
    async with ScriptedServer(does_nothing) as server:
        env = make(Few, server, tmp_path, eval_items=5)
        result = await env._run_evaluate()
    said = shown(result)
    assert "every reward is 0.00" in said
    assert "get_eval_items gave 2 of the 5 that env.eval_items requests" in said
    assert "sort-words: rollouts 2/2; " in (tmp_path / "console.txt").read_text()


async def test_an_evaluation_says_that_its_figures_have_more_items_than_it_requested(tmp_path: Path) -> None:
    said = []
    for count in (2, 1):
        async with ScriptedServer(does_nothing) as server:
            said.append(shown(await make(Few, server, tmp_path, eval_items=count)._run_evaluate()))
    told = "the figures are of 2 items, and this start requested 1: the others"
    assert told in said[1].partition("mean reward")[0] and "this start requested" not in said[0]


def test_a_command_that_is_wider_than_the_terminal_is_folded_so_that_it_can_be_pasted() -> None:
    line = (
        "lachesis train --sft data/run/trajectory_samples.jsonl --sft.min_reward 1 --training.base_model MODEL   (why)"
    )
    assert folded(line, 200) == line.replace("   (", "\n(")
    short = folded(line, 60).splitlines()
    assert max(map(len, short)) <= 60 and short[-1] == "(why)"
    assert " ".join(each.removesuffix("\\").strip() for each in short[:-1]) == line.partition("   (")[0]


async def test_an_environment_without_any_item_says_so(tmp_path: Path) -> None:
    class Empty(SortWords):
        async def get_next_item(self) -> Any:
            return None

    result = await process(Empty, tmp_path, [say("x")], total_steps=3)
    assert "get_next_item gave 0 of the 3" in shown(result)


async def test_one_of_anything_is_said_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mistakes = ["a mistake"]

    class Raises(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            if mistakes:
                raise ValueError(mistakes.pop())
            return 1.0

    raised, _, _ = [await process(Raises, tmp_path, sorts, total_steps=1, group_size=1) for _ in range(3)]
    assert "1 x environment: ValueError: a mistake" in shown(raised)
    assert "groups.jsonl: 1 group done" in (tmp_path / "console.txt").read_text()
    assert lachesis(["export", str(tmp_path / "groups.jsonl"), "--format", "trl", "--out", str(tmp_path / "trl")]) == 0
    assert "1 line from 1 rollout of 1 group: " in capsys.readouterr().out
    assert (counted(0, "group"), counted(1, "group"), counted(2, "group")) == ("0 groups", "1 group", "2 groups")


@pytest.mark.parametrize("width", [60, 140])
def test_no_width_of_a_terminal_cuts_the_counts(width: int) -> None:
    console = Console(file=(out := io.StringIO()), width=width, force_terminal=True)
    note = "about 0:02 left, 2 groups sent, 0 waiting, 0 refused; 2 groups playing"
    cause = "2 x infra error: " + "the server rejects the request " * 5 + "to the end"
    with Progress(console, "an-environment") as progress:
        progress.show(Standing(4, 6, "groups", note, [("because", cause)]))
    said = " ".join(Text.from_ansi(out.getvalue()).plain.split())
    assert f"groups 4/6; {note}" in said and cause in said


WORDS = "the server rejects the request because its queue is full and nobody reads from it"


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_the_live_table_and_the_last_one_wrap_between_words(width: int) -> None:
    class Result(ShownResult):
        def rows(self) -> Iterator[tuple[str, str]]:
            yield "failed calls", WORDS

        def warnings(self) -> Iterator[str]:
            yield WORDS

    console = Console(file=(out := io.StringIO()), width=width, force_terminal=True)
    with Progress(console, "an-environment") as progress:
        progress.show(Standing(4, 6, "groups", "", [("because", WORDS)]))
    print_result(console, Result())
    printed = Text.from_ansi(out.getvalue()).plain
    assert all(len(line.rstrip()) <= width for line in printed.splitlines())
    assert set(re.split(r"\W+", printed)) >= set(WORDS.split()), "no word is cut in two"


def test_without_a_terminal_a_line_a_minute_is_short() -> None:
    console = Console(file=(out := io.StringIO()), width=80)
    rows = [("mean", "0.5 [0.4, 0.6]"), ("because", WORDS * 3), ("failed", WORDS * 3), ("last", WORDS)]
    with Progress(console, "an-environment") as progress:
        for done in range(5):
            progress.show(Standing(done, 6, "groups", "", rows))
    [line] = out.getvalue().splitlines()
    assert line.startswith("an-environment: groups 0/6; mean 0.5 [0.4, 0.6]; because the server rejects")
    assert line.endswith(" …") and len(line) < 160


async def test_the_last_table_says_score_then_failures_then_tools_then_cost(tmp_path: Path) -> None:
    async def some(request: dict[str, Any]) -> Any:
        await asyncio.sleep(0.1)  # the row of the time is left out below 0.05 s
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        return call(("read_file", {"path": "missing.txt"}))

    result = await process(SortWords, tmp_path, some)
    names = list(dict.fromkeys(name for name, _ in result.rows()))
    order = ["mean reward", "rollouts", "outcomes", "tool calls", "failed calls", "time", "tokens", "tokens/s"]
    assert [name for name in names if name in order] == order
    assert "missing.txt" in dict(result.rows())["failed calls"] or "read_file" in dict(result.rows())["failed calls"]


async def test_rewards_that_are_all_nothing_lead_to_the_cause_that_the_outcomes_show(tmp_path: Path) -> None:
    def cut_off(_: dict[str, Any]) -> web.Response:
        choice = {"index": 0, "message": {"role": "assistant", "content": "so"}, "finish_reason": "length"}
        return web.json_response({"object": "chat.completion", "model": "m", "choices": [choice]})

    for name in ("cut", "idle"):
        (tmp_path / name).mkdir()
    said = shown(await process(SortWords, tmp_path / "cut", cut_off, total_steps=1))
    assert "reward is 0.00: 2 of 2 rollouts were cut off: allow longer answers with --env.max_token_length (-t)" in said
    assert said.index("every reward") < said.index("groups.jsonl") < said.index("next "), "the files stand below"
    said = shown(await process(SortWords, tmp_path / "idle", does_nothing, total_steps=1))
    assert "every reward is 0.00: read some rollouts" in said


def test_a_table_in_a_file_has_no_trailing_blanks() -> None:
    table = Table("policy", "note", box=None, pad_edge=False)
    table.add_row("reference", "a long note")
    table.add_row("nothing", "")
    console = Console(file=io.StringIO(), width=80)
    print_table(console, table)
    assert console.file.getvalue() == "policy     note\nreference  a long note\nnothing\n"
