"""`evaluate` and its figures: Atropos' schema, honest intervals, and nothing that is not valid JSON."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from lachesis.cli import main as lachesis
from lachesis.figures.intervals import mean_over_items
from lachesis.figures.item_keys import item_digest
from lachesis.figures.passes import pass_at_k
from lachesis.runs import command_line as cli
from lachesis.runs.failures import RunStopped
from lachesis.runs.run_folder import OtherSettings, RunFolderError
from tests.support import report_pages
from tests.support.guesses import Guesses, chance, score_of
from tests.support.report_pages import read
from tests.support.scripted_server import ScriptedServer
from tests.support.small_envs import ManyWords, SortWords, does_nothing, lines, make, served, sorts, start


async def evaluate(folder: Path, policy: Any = sorts, env_cls: type[SortWords] = ManyWords, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    async with ScriptedServer(policy) as server:
        return await make(env_cls, server, folder, **settings)._run_evaluate(), server


async def test_metrics_have_the_schema_of_atropos(tmp_path: Path) -> None:
    result, server = await evaluate(tmp_path, eval_items=4, eval_temperature=0.25, max_token_length=77)
    metrics = json.loads((tmp_path / "eval" / "metrics.json").read_text(), parse_constant=pytest.fail)
    assert set(metrics) == {"config_general", "results"}
    general = metrics["config_general"]
    assert general["model_name"] == "scripted"
    assert general["generation_parameters"] == {"max_new_tokens": 77, "temperature": 0.25}
    assert float(general["total_evaluation_time_seconds"]) >= 0
    assert set(metrics["results"]) == {"all", "atropos|many-words_eval|0"}
    figures = metrics["results"]["all"]
    samples = lines(tmp_path / "eval" / "samples.jsonl")
    assert figures["eval/avg_reward"] == 1.0, [sample["rollouts"] for sample in samples]
    assert 0.3 < figures["eval/avg_reward_low"] < 1.0 == figures["eval/avg_reward_high"]
    assert (figures["eval/items"], figures["eval/tool_use_rate"], figures["eval/outcome/completed"]) == (4, 1.0, 4)
    assert {request["temperature"] for request in server.requests} == {0.25}
    assert [len(sample["scores"]) for sample in samples] == [1] * 4
    assert result.files.report.exists()


async def test_a_second_start_goes_on(tmp_path: Path) -> None:
    await evaluate(tmp_path, eval_items=2)
    result, server = await evaluate(tmp_path, eval_items=5)
    assert (result.played, result.summary.items, len(server.requests)) == (3, 5, 6)
    again, server = await evaluate(tmp_path, eval_items=5)
    assert (again.played, again.summary.reward.mean, server.requests) == (0, 1.0, [])


async def test_without_a_scored_rollout_there_is_no_figure_and_no_nan(tmp_path: Path) -> None:
    class NoScores(SortWords):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Any:
            return None

    await evaluate(tmp_path, does_nothing, NoScores, eval_items=2)
    text = (tmp_path / "eval" / "metrics.json").read_text()
    figures = json.loads(text, parse_constant=pytest.fail)["results"]["all"]
    assert "eval/avg_reward" not in figures
    assert (figures["eval/scored_rollouts"], figures["eval/left_out_rollouts"]) == (0, 2)
    with pytest.raises(RunStopped, match="without a scored rollout"):
        await evaluate(tmp_path, does_nothing, NoScores, eval_items=3, max_failed_groups=1)


def test_an_evaluation_of_ones_own_still_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Own(SortWords):
        name = "own"

        async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
            completion = await self.server.chat_completion(messages=[{"role": "user", "content": "hi"}], split="eval")
            said = completion.choices[0].message.content
            await self.evaluate_log({"eval/said": len(said)}, start_time=time.time(), end_time=time.time())

    with served(does_nothing) as server:
        arguments = ["evaluate", "--openai.base_url", server.base_url, "--openai.model_name", "scripted"]
        arguments += ["--env.data_dir_to_save_evals", str(tmp_path / "own"), "--openai.api_key", "sk-secret"]
        assert cli.main(Own, arguments) == 0
        first = (tmp_path / "own" / "metrics.json").read_text()
        assert json.loads(first)["results"]["all"] == {"eval/said": len("I would rather not.")}
        assert cli.main(Own, arguments) == 0
    assert (tmp_path / "own" / "metrics.json").read_text() == first, "the second has a folder of its own"
    assert "own contains another evaluation; this one is in" in capsys.readouterr().err
    assert (tmp_path / "own-2" / "metrics.json").exists()
    text = (tmp_path / "own-2" / "evaluate_config.yaml").read_text()
    written = yaml.safe_load(text)
    assert (written["openai"][0]["model_name"], written["env"]["max_agent_turns"]) == ("scripted", 30)
    assert "secret" not in text


# Several samples of each item.


def expected(items: int, samples: int) -> list[list[float | None]]:
    return [[score_of(number, sample) for sample in range(samples)] for number in range(items)]


async def guesses(folder: Path, policy: Any = does_nothing, **settings: Any) -> Any:
    settings = {"enabled_toolsets": [], "max_failed_groups": 100, "eval_temperature": 1.0, **settings}
    return (await evaluate(folder, policy, Guesses, **settings))[0]


def figures_of(folder: Path) -> dict[str, Any]:
    figures: dict[str, Any] = json.loads((folder / "eval" / "metrics.json").read_text(), parse_constant=pytest.fail)
    return figures["results"]["all"]


def recorded(folder: Path) -> list[dict[str, Any]]:
    return [*lines(folder / "eval" / "samples.jsonl"), *lines(folder / "eval" / "samples.failed.jsonl")]


async def test_each_item_has_its_samples_and_each_sample_a_line_and_a_trajectory(tmp_path: Path) -> None:
    result = await guesses(tmp_path, eval_items=10, eval_samples=4)
    scores = expected(10, 4)
    samples = recorded(tmp_path)
    found = {
        (sample["item"]["number"], rollout["index"]): rollout["reward"]
        for sample in samples
        for rollout in sample["rollouts"]
    }
    assert found == {(item, at): score for item, row in enumerate(scores) for at, score in enumerate(row)}
    assert len({sample["item_key"] for sample in samples}) == len(samples) == 40
    assert {sample["category"] for sample in samples} == {"easy", "hard"}
    entries = lines(tmp_path / "eval" / "trajectory_samples.jsonl")
    valid = sum(score is not None for row in scores for score in row)
    assert len({entry["rollout_id"] for entry in entries}) == len(entries) == valid
    assert result.summary.reward == mean_over_items(scores)
    figures = figures_of(tmp_path)
    assert figures["eval/pass@4"] == pytest.approx(pass_at_k(scores, 4).mean)
    assert figures["eval/pass@4_low"] == pytest.approx(pass_at_k(scores, 4).low)
    assert figures["eval/avg_reward_worst_case"] < figures["eval/avg_reward"] < figures["eval/avg_reward_best_case"]
    assert figures["eval/category/hard"] == pytest.approx(mean_over_items(scores[::2]).mean)
    assert figures["eval/items"] == 10
    rows = dict(result.rows())
    assert rows["invalid"] == f"{40 - valid} of 40 ({2.5 * (40 - valid):.1f} %): declined {40 - valid}"
    assert "if the invalid ones had scores" in rows["pass^2"]


async def test_items_and_samples_are_scheduled_together_within_the_limit_of_rollouts(tmp_path: Path) -> None:
    """All items come before the second sample of the first one, and no more rollouts run at once than may."""
    asked: list[str] = []
    busy = most = 0
    full = asyncio.Event()

    def counts(request: dict[str, Any]) -> Any:
        async def answer() -> Any:
            nonlocal busy, most
            busy += 1
            most = max(most, busy)
            if busy == 4:
                full.set()
            asked.append(request["messages"][-1]["content"])
            await asyncio.wait_for(full.wait(), 60)
            await asyncio.sleep(0.02)
            busy -= 1
            return does_nothing(request)

        return answer()

    await guesses(tmp_path, counts, eval_items=6, eval_samples=5, max_eval_workers=4)
    assert most == 4
    rounds = [asked[at : at + 6] for at in range(0, 30, 6)]
    first = {f"Guess {number}." for number in range(6)}
    assert all(len(set(each) - first) == 0 for each in rounds)
    assert len(set(rounds[0])) >= 4, "not all samples of one item first"
    assert Counter(asked) == dict.fromkeys(first, 5)


async def test_more_samples_and_more_items_continue_an_evaluation(tmp_path: Path) -> None:
    await guesses(tmp_path, eval_items=4, eval_samples=2)
    more = await guesses(tmp_path, eval_items=4, eval_samples=3)
    assert more.played + more.failed_groups == 4 + sum(score is None for row in expected(4, 2) for score in row)
    last = await guesses(tmp_path, eval_items=6, eval_samples=3)
    assert last.summary.reward == mean_over_items(expected(6, 3))
    assert last.summary.rollouts == 18
    assert len(json.loads((tmp_path / "eval" / "samples.run.json").read_text())["items"]) == 6


async def test_equal_items_have_samples_of_their_own(tmp_path: Path) -> None:
    class Twice(Guesses):
        async def get_eval_items(self) -> Any:
            return [{"number": 0}, {"number": 1}, {"number": 0}][: self.config.eval_items]

    settings = {"enabled_toolsets": [], "eval_temperature": 1.0, "eval_samples": 2, "max_failed_groups": 100}
    await evaluate(tmp_path, does_nothing, Twice, eval_items=2, **settings)
    result, _ = await evaluate(tmp_path, does_nothing, Twice, eval_items=3, **settings)
    rows = expected(2, 2)
    assert result.summary.reward == mean_over_items([*rows, rows[0]])
    assert (result.summary.items, result.summary.rollouts) == (3, 6)


async def test_other_items_settings_or_models_are_refused_with_the_difference(tmp_path: Path) -> None:
    await guesses(tmp_path, eval_items=3, eval_samples=2)

    class Others(Guesses):
        async def get_eval_items(self) -> Any:
            return [{"number": 0}, *(await super().get_eval_items())[1:]]

    before = (tmp_path / "eval" / "samples.jsonl").read_bytes()
    settings = {"enabled_toolsets": [], "eval_temperature": 1.0, "eval_items": 3}
    with pytest.raises(OtherSettings, match="1 of its 3 are not among the 3 that the environment gives now"):
        await evaluate(tmp_path, does_nothing, Others, **settings)
    with pytest.raises(OtherSettings, match=r"eval_temperature: 1.0 then, 0.5 now"):
        await guesses(tmp_path, eval_items=3, eval_temperature=0.5)
    Others.name = "others"
    with pytest.raises(OtherSettings, match=r"samples.jsonl holds rollouts of \S+, not of others; start it as before"):
        await evaluate(tmp_path, does_nothing, Others, **settings)
    assert (tmp_path / "eval" / "samples.jsonl").read_bytes() == before
    digests = json.loads((tmp_path / "eval" / "samples.run.json").read_text())["digests"]
    assert sorted(digests) == ["data", "model", "settings"]


async def test_failures_before_the_first_score_do_not_count_where_other_items_or_settings_follow(
    tmp_path: Path,
) -> None:
    class Others(Guesses):
        async def get_eval_items(self) -> Any:
            return [{"number": 0, "other": True}, {"number": 1, "other": True}]

    broken = await guesses(tmp_path, lambda _: 503, eval_items=4)
    assert broken.summary.exclusion.unscored == {"model_server": 4}
    again = await guesses(tmp_path, lambda _: 503, eval_items=3)
    assert (again.summary.rollouts, figures_of(tmp_path)["eval/left_out_rollouts"]) == (3, 3)
    again = await guesses(tmp_path, lambda _: 503, eval_items=2, eval_temperature=0.5)
    assert again.summary.rollouts == 2
    settings = {"enabled_toolsets": [], "eval_temperature": 1.0, "max_failed_groups": 100}
    result, _ = await evaluate(tmp_path, does_nothing, Others, eval_items=2, **settings)
    assert (result.summary.items, result.summary.rollouts, result.summary.exclusion.unscored) == (2, 2, {})
    assert len(recorded(tmp_path)) == 2
    # From the first score on, its items are those of the evaluation.
    with pytest.raises(OtherSettings, match="2 of its 2 are not among the 2 that the environment gives now"):
        await guesses(tmp_path, eval_items=2)


async def test_fewer_items_play_nothing_and_show_what_is_there(tmp_path: Path) -> None:
    await guesses(tmp_path, eval_items=5, eval_samples=2)
    fewer = await guesses(tmp_path, eval_items=2, eval_samples=1)
    assert (fewer.played, fewer.summary.rollouts) == (0, 10)
    scored = fewer.summary.scored
    assert f"rollouts {scored}/{scored};" in (tmp_path / "console.txt").read_text().splitlines()[-1]


@pytest.mark.parametrize("name", ["samples.html", "metrics.json"])
async def test_a_full_disk_at_the_end_names_the_file_and_loses_nothing(tmp_path: Path, name: str) -> None:
    first = await guesses(tmp_path, eval_items=5)
    before = figures_of(tmp_path)
    (tmp_path / "eval" / f"{name}.tmp").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match=f"cannot write .*{name}.*No space left on device; make room there"):
        await guesses(tmp_path, eval_items=5)
    assert figures_of(tmp_path) == before
    (tmp_path / "eval" / f"{name}.tmp").unlink()
    assert (await guesses(tmp_path, eval_items=5)).summary.reward == first.summary.reward


async def test_with_20_percent_of_requests_failing_the_mean_is_that_of_the_others(tmp_path: Path) -> None:
    """Of a whole run: the server fails a fifth of the rollouts, whatever their item."""
    dice = random.Random(3)

    def fails(request: dict[str, Any]) -> Any:
        return 503 if dice.random() < 0.2 else does_nothing(request)

    class Certain(Guesses):
        def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(dice.random() < chance(item["number"]))

    settings = {"enabled_toolsets": [], "eval_temperature": 1.0, "eval_items": 80, "eval_samples": 2}
    result, _ = await evaluate(tmp_path, fails, Certain, **settings, max_failed_groups=9)
    summary = result.summary
    assert summary.rollouts == 160
    assert 15 < summary.rollouts - summary.scored < 50
    assert set(summary.exclusion.unscored) == {"model_server"}
    assert summary.reward.low < 0.55 < summary.reward.high
    figures = figures_of(tmp_path)
    assert figures["eval/avg_reward_worst_case"] < figures["eval/avg_reward"]
    again, _ = await evaluate(tmp_path, does_nothing, Certain, **settings)
    assert again.played == 160 - summary.scored, "the next start plays the samples without a score, and no others"
    assert (again.summary.scored, figures_of(tmp_path)["eval/left_out_rollouts"]) == (160, 0)


async def test_where_no_sample_has_a_score_the_table_has_one_row_about_it(tmp_path: Path) -> None:
    rows = dict((await guesses(tmp_path, lambda _: 503, eval_items=2, eval_samples=2)).rows())
    assert rows["mean reward"] == "undefined: no rollout has a score"
    assert rows["invalid"] == "4 of 4 (100.0 %): model_server 4"
    assert not {"pass@2", "left out most"} & rows.keys()


async def test_a_sample_that_never_became_a_rollout_is_invalid_too(tmp_path: Path) -> None:
    class Odd(Guesses):
        def group_tools(self, item_key: str) -> Any:
            if item_key == bad:
                raise ValueError("no tools for this one")
            return super().group_tools(item_key)

    bad = f"{item_digest({'number': 1, 'metadata': {'category': 'easy'}})}-1"
    settings = {"enabled_toolsets": [], "eval_temperature": 1.0, "max_failed_groups": 100}
    result, _ = await evaluate(tmp_path, does_nothing, Odd, eval_items=2, eval_samples=3, **settings)
    assert result.summary.rollouts == 6
    assert result.summary.exclusion.unscored["environment"] == 3
    assert [score for key, scores in result.summary.scores.items() if key == bad for score in scores] == [None] * 3
    assert "no tools for this one" in report_pages.everything(result.files.report.read_text())


async def test_the_figures_are_shown_while_it_plays(tmp_path: Path) -> None:
    await guesses(tmp_path, eval_items=5, eval_samples=2)
    said = (tmp_path / "console.txt").read_text()
    reward = mean_over_items(expected(5, 2))
    assert f"guesses: rollouts 10/10; mean {reward}; outcomes completed 10" in said
    (tmp_path / "terminal").mkdir()
    async with ScriptedServer(does_nothing) as server:
        env = make(Guesses, server, tmp_path / "terminal", enabled_toolsets=[], eval_items=5, eval_samples=2)
        env.console = Console(file=(out := io.StringIO()), width=120, force_terminal=True)
        await env._run_evaluate()
    assert "rollouts 10/10" in out.getvalue()
    assert f"{reward.mean:.3f}" in out.getvalue().split("rollouts 10/10")[0], "a table over the bar"


@pytest.mark.parametrize(
    ("settings", "temperature", "said"),
    [
        ({}, 0.0, ""),
        ({"eval_samples": 2}, 1.0, "2 rollouts of each item, at temperature 1 (env.agent_temperature;"),
        ({"eval_samples": 2, "agent_temperature": 0.5}, 0.5, "at temperature 0.5 (env.agent_temperature;"),
        ({"eval_samples": 2, "eval_temperature": 0.7}, 0.7, ""),
        ({"eval_samples": 2, "eval_temperature": 0.0}, 0.0, "at temperature 0, at which they are mostly identical"),
    ],
)
async def test_several_samples_of_an_item_are_sampled_at_the_agents_temperature_unless_one_is_set(
    settings: dict[str, Any], temperature: float, said: str, tmp_path: Path
) -> None:
    _, server = await evaluate(tmp_path, does_nothing, Guesses, enabled_toolsets=[], eval_items=1, **settings)
    assert {request["temperature"] for request in server.requests} == {temperature}
    about = json.loads(next((tmp_path / "eval").glob("*.run.json")).read_text())
    assert about["settings"]["eval_temperature"] == temperature
    console = (tmp_path / "console.txt").read_text()
    assert said in console and bool(said) == ("--env.eval_temperature sets it" in console)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, pytest.param(50, marks=pytest.mark.long)])
def test_after_kill_9_at_random_moments_the_table_is_that_of_an_uninterrupted_run(tmp_path: Path, kills: int) -> None:
    items, samples = 10 + kills, 3
    allowed = 0
    dice = random.Random(kills)

    def braked(request: dict[str, Any]) -> Any:
        """Answers as often as it may: a start ends with what it was killed in."""

        async def answer() -> Any:
            nonlocal allowed
            while allowed <= 0:  # noqa: ASYNC110 - what it waits for is set by another thread
                await asyncio.sleep(0.01)
            allowed -= 1
            return does_nothing(request)

        return answer()

    def arguments(folder: Path) -> list[str]:
        settings = {"eval_items": items, "eval_samples": samples, "eval_temperature": 1, "max_eval_workers": 4}
        flags = [part for name, value in settings.items() for part in (f"--env.{name}", str(value))]
        return [
            *("-m", "tests.support.guesses", "evaluate", "--openai.base_url", server.base_url),
            *("--openai.model_name", "scripted", "--env.max_failed_groups", "100", *flags),
            *("--env.data_dir_to_save_evals", str(folder / "eval")),
        ]

    with served(braked) as server:
        for _ in range(kills):
            allowed = dice.randint(0, 2 * samples)
            child = start(arguments(tmp_path / "killed"))
            ends = time.monotonic() + 100
            if dice.random() < 0.7:  # in the middle of the answers; otherwise at any moment, start-up included
                while allowed > 0 and time.monotonic() < ends and child.poll() is None:
                    time.sleep(0.005)
                time.sleep(dice.random() * 0.02)
            else:
                time.sleep(dice.random())
            child.send_signal(signal.SIGKILL)
            child.communicate()
        outputs = []
        for folder in ("killed", "whole"):
            allowed = 10**6
            child = start(arguments(tmp_path / folder))
            outputs.append(child.communicate(timeout=200)[0])
            assert child.returncode == 1, "declined samples can be played again"
    tables = [
        [
            line
            for line in output[output.rindex("\nmean reward ") :].splitlines()
            if not line.startswith(("rollouts ", "time ", "tokens/s ", "groups ", "trajectories ", "report ", "next "))
            and "start again" not in line
        ]
        for output in outputs
    ]
    assert tables[0] == tables[1]
    assert any("pass@3" in line for line in tables[0])
    killed, whole = (lines(tmp_path / folder / "eval" / "samples.jsonl") for folder in ("killed", "whole"))
    assert {each["item_key"]: each["scores"] for each in killed} == {each["item_key"]: each["scores"] for each in whole}
    assert len({each["item_key"] for each in killed}) == len(killed)
    # The tests of a biased selection look at seconds, and the p of each is adjusted for the others.
    timed = ("seconds", "unscored_p/")
    metrics = [
        {
            name: value
            for name, value in figures_of(tmp_path / folder).items()
            if not any(each in name for each in timed)
        }
        for folder in ("killed", "whole")
    ]
    assert metrics[0] == metrics[1]
    entries = lines(tmp_path / "killed" / "eval" / "trajectory_samples.jsonl")
    assert sorted(each["rollout_id"] for each in entries) == sorted(
        each["rollouts"][0]["rollout_id"] for each in killed
    )


# Two evaluations.


class Better(Guesses):
    """The same items with a higher score."""

    def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        return 1.0 if item["number"] % 4 == 0 else super().compute_reward(item, result, ctx)


async def test_two_evaluations_are_compared_item_by_item(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await guesses(tmp_path / "a", eval_items=24, eval_samples=2)
    settings = {"enabled_toolsets": [], "eval_items": 20, "eval_samples": 2, "max_failed_groups": 100}
    await evaluate(tmp_path / "b", does_nothing, Better, **settings, eval_temperature=0.5)
    a, b, page = (str(tmp_path / name) for name in ("a/eval", "b/eval/samples.jsonl", "both.html"))
    await asyncio.to_thread(lachesis, ["eval", "compare", a, b, "--html", page])
    said = capsys.readouterr().out
    assert "common items: 20; 4 only in A, 0 only in B" in said
    assert "eval_temperature: 1.0 in A, 0.5 in B" in said
    assert "B is higher at" in said
    assert "declined" in said
    shown = read(Path(page).read_text()).text
    assert "mean reward of B minus that of A" in shown.partition("invalid")[0], "it comes first"
    for line in said[said.index("common items") : said.index("mean reward, 95")].split("\n"):
        assert " ".join(line.split()) in " ".join(shown.split()), "the page says what the terminal does"
    await asyncio.to_thread(lachesis, ["eval", "compare", a, b, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["mean"] > 0
    assert found["difference"]["worse"] == 0
    assert found["difference"]["low"] < found["difference"]["mean"] < found["difference"]["high"]
    assert found["categories"]["easy"]["mean"] == 0
    assert found["figures"]["mean reward"]["a"]["mean"] == pytest.approx(mean_over_items(expected(24, 2)).mean)


class FewWords(ManyWords):
    """Its second item comes again and again."""

    async def setup(self) -> None:
        self.items = itertools.chain(["pear fig apple"], itertools.repeat("delta alpha"))


async def test_a_comparison_says_where_items_come_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        await evaluate(tmp_path / name, env_cls=FewWords, eval_items=6)
    a, b, page = (str(tmp_path / name) for name in ("a/eval", "b/eval", "both.html"))
    assert await asyncio.to_thread(lachesis, ["eval", "compare", a, b, "--html", page]) == 0
    again = "6, 2 of them distinct: the interval is too narrow"
    found = capsys.readouterr().out, read(Path(page).read_text()).text
    for said in (" ".join(each.split()) for each in found):
        assert f"common items: {again}; 0 only in A" in said or f"common items {again}; 0 only in A" in said


async def test_what_cannot_be_compared_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    await guesses(tmp_path / "a", eval_items=2)
    await evaluate(tmp_path / "b", eval_items=2)
    (tmp_path / "c.jsonl").write_text('{"a": 1}\n')
    a, b = (str(tmp_path / name / "eval") for name in "ab")
    missing, foreign, empty = str(tmp_path / "d"), str(tmp_path / "c.jsonl"), str(tmp_path / "e.jsonl")
    Path(empty).touch()
    reasons = ("no item in common", "there is no file or folder", "lines are not", f"{empty} is empty")
    for other, why in zip((b, missing, foreign, empty), reasons, strict=True):
        assert await asyncio.to_thread(lachesis, ["eval", "compare", a, other]) == (
            2 if other in (missing, empty) else 1
        )
        assert why in capsys.readouterr().err
