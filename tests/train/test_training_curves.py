"""What a training run writes down: figures with known values, nothing twice, nothing of a model as markup."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from lachesis.cli import main
from lachesis_tokens.verbs.verify import verify_file
from lachesis_train.curves.estimators import LARGEST_LOG_RATIO, token_estimates
from lachesis_train.curves.metrics import rollout_rewards, step_metrics
from lachesis_train.curves.progress import FIGURES, TrainingProgress
from lachesis_train.curves.recorder import GroupRecord, SampleRecord, StepRecord, TrainingRecorder, WandbSettings
from lachesis_view.html import ended
from lachesis_view.reports import training as report_module
from lachesis_view.reports.charts import Line, bar_chart, line_chart, number
from tests.core.runs.test_wandb import logged
from tests.support.trained_groups import decode, group_body, step, trained

CALL = '{"a": 1, "b": 2}'
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> {{ 7 * 7 }} \"'<!-- \ud83d"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# Estimators, by hand: q = (1/2, 1/4), p = (1/4, 1/2), so that the ratios are 1/2 and 2.

HALF, QUARTER = math.log(1 / 2), math.log(1 / 4)


def test_the_estimates_are_those_worked_out_by_hand() -> None:
    found = token_estimates([([HALF, QUARTER], [QUARTER, HALF], 1.0)])
    assert found.tokens == 2
    assert found.sampler_logprob == found.trainer_logprob == pytest.approx(-1.5 * math.log(2))
    assert found.entropy == pytest.approx(1.5 * math.log(2))
    assert found.kl_k1 == pytest.approx(0.0), "-(log 1/2 + log 2) / 2"
    assert found.kl_k3 == pytest.approx(0.25), "((1/2 - 1) + (2 - 1)) / 2, as the logs cancel"
    assert (found.ratio_min, found.ratio_mean, found.ratio_max) == pytest.approx((0.5, 1.25, 2.0))
    assert found.effective_sample_size == pytest.approx(2.5**2 / (2 * 4.25))
    assert found.mean_difference == found.largest_difference == pytest.approx(math.log(2))


def test_k1_is_the_mean_difference_and_k3_is_never_negative() -> None:
    found = token_estimates([([-1.0, -2.0], [-1.1, -2.3], 1.0), ([-3.0], [-2.9], -1.0)])
    assert found.kl_k1 == pytest.approx((0.1 + 0.3 - 0.1) / 3)
    terms = [math.exp(r) - 1 - r for r in (-0.1, -0.3, 0.1)]
    assert found.kl_k3 == pytest.approx(sum(terms) / 3)
    assert token_estimates([([-1.0], [-0.5], 1.0)]).kl_k3 > 0 > token_estimates([([-1.0], [-0.5], 1.0)]).kl_k1


def test_a_token_is_clipped_only_on_the_side_that_its_advantage_pushes_to() -> None:
    logprobs = [HALF, QUARTER], [QUARTER, HALF]  # ratios 1/2 and 2
    up = token_estimates([(*logprobs, 1.0)], (0.8, 1.2))
    down = token_estimates([(*logprobs, -1.0)], (0.8, 1.2))
    assert (up.clipped_low, up.clipped_high) == (0.0, 0.5)
    assert (down.clipped_low, down.clipped_high) == (0.5, 0.0)
    still = token_estimates([(*logprobs, 0.0)], (0.8, 1.2))
    assert (still.clipped_low, still.clipped_high) == (0.0, 0.0)
    assert token_estimates([(*logprobs, 1.0)], (0.5, 2.0)).clipped_high == 0.0, "a bound itself is not clipped"


def test_equal_logprobs_have_no_divergence_and_count_fully() -> None:
    found = token_estimates([([-0.3, -0.7, -1.1], [-0.3, -0.7, -1.1], 1.0)])
    assert (found.kl_k1, found.kl_k3, found.effective_sample_size) == (0.0, 0.0, 1.0)


def test_one_impossible_token_does_not_make_the_figures_infinite() -> None:
    found = token_estimates([([-5000.0, -1.0], [0.0, -1.0], 1.0)])
    assert found.ratio_max == math.exp(LARGEST_LOG_RATIO)
    assert found.effective_sample_size == pytest.approx(0.5)
    assert math.isfinite(found.kl_k3)


def test_logprobs_that_do_not_belong_together_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 logprobs of the sampler, 1 of the trainer"):
        token_estimates([([-1.0, -1.0], [-1.0], 1.0)])


# Metrics.


def test_a_step_has_its_figures_under_the_names_of_the_field() -> None:
    groups = [
        trained(group_body("g0", "add", [CALL, "no idea"], [1.0, 0.0]), drift=-0.1, staleness=2),
        trained(group_body("g1", "add", [CALL, CALL], [1.0, 1.0])),
        GroupRecord(body={"scores": [0.5]}, skipped="unproven", detail="no certificates"),
    ]
    record = step(
        7,
        groups,
        loss={"loss:sum": -0.25, "grad_norm": 2.0},
        evaluation={"exact": 0.5},
        learning_rate=1e-4,
        ratio_bounds=(0.8, 1.2),
        seconds={"wait": 1.0, "train": 2.5, "check": 0.5},
        queue=5,
    )
    found = step_metrics(record)
    size = len(CALL) + 1 + len("no idea") + 1
    assert found["train/tokens"] == size
    expected = {
        "version": "run:8",
        "batch_id": 7,
        "train/loss": -0.25,
        "train/grad_norm": 2.0,
        "eval/exact": 0.5,
        "train/learning_rate": 1e-4,
        "train/groups": 3,
        "train/samples": 2,
        "train/queue": 5,
        "train/reward": (0.5 + 1.0 + 0.5) / 3,
        "train/frac_reward_zero_std": 2 / 3,
        "train/skipped/same_scores": 2,
        "train/skipped/unproven": 1,
        "train/outcome/completed": 4,
        "train/sampling/kl_k1": 0.1,
        "train/sampling/kl_k3": math.exp(-0.1) - 1 + 0.1,
        "train/entropy": 0.5,
        "logprobs/mean": -0.5,
        "logprobs/mean_training": -0.6,
        "logprobs/diff": 0.1,
        "train/staleness/mean": 2.0,
        "train/staleness/max": 2,
        "train/clip_ratio/region_mean": 0.0,
        "train/completions/max_length": len(CALL) + 1,
        "train/completions/clipped_ratio": 0.0,
        "train/step_time": 4.0,
        "train/tokens_per_second": size / 4,
        "time/wait": 1.0,
        "time/train": 2.5,
        "train/overhead": 0.125,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    json.dumps(found, allow_nan=False)


def test_a_step_without_anything_to_train_has_no_invented_figures() -> None:
    found = step_metrics(step(0, [trained(group_body("g", "add", [CALL, CALL], [1.0, 1.0]))]))
    assert found["train/samples"] == found["train/tokens"] == 0
    assert not {name for name in found if name.startswith(("train/sampling", "logprobs/"))} | found.keys() & {
        "train/entropy",
        "train/loss",
        "train/queue",
    }


def test_a_rollout_has_one_reward_however_many_samples_it_has() -> None:
    names = [("a", False), ("a", False), ("a", True), ("b", False)]
    overrides = [{"lachesis": {"rollout_id": name, "discarded": discarded}} for name, discarded in names]
    assert rollout_rewards({"scores": [1.0, 1.0, -0.5, 0.0], "overrides": overrides}) == [1.0, 0.0]
    assert rollout_rewards({"scores": [1.0, 0.0, math.nan, None]}) == [1.0, 0.0], "stock groups have no certificates"


# The recorder.


def recorded(folder: Path, steps: range, **more: Any) -> None:
    with TrainingRecorder(folder, first_step=steps.start, decode=decode, **more) as recorder:
        for number_of in steps:
            recorder.step(step(number_of, [trained(group_body(f"s{number_of}", "add", [CALL, "no"], [1.0, 0.0]))]))


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    recorded(tmp_path, range(5))
    (tmp_path / "metrics.jsonl").open("ab").write(b'{"step": 5, "tra')
    with TrainingRecorder(tmp_path, first_step=3) as recorder:
        assert recorder.rewound == 2
        assert [path.name for path in sorted((tmp_path / "rollouts").iterdir())] == [
            f"step_0000{at}.jsonl" for at in range(3)
        ]
        recorder.step(step(3, []))
        with pytest.raises(ValueError, match="step 3 has been recorded; the next one is 4"):
            recorder.step(step(3, []))
        recorder.step(step(4, []))
    assert [(line["step"], "resumed" in line) for line in lines(tmp_path)] == [(at, at == 3) for at in range(5)]
    assert "Resumed before step 3." in (tmp_path / "report.html").read_text()


def test_the_steps_that_were_recorded_survive_kill_9(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tests.train.test_training_curves import *
recorder = TrainingRecorder({str(tmp_path)!r}, decode=decode)
for at in range(3):
    recorder.step(step(at, [trained(group_body("s%d" % at, "add", [CALL, "no"], [1.0, 0.0]))]))
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program], check=False, env={**os.environ, "PYTHONPATH": "."})
    assert ended.returncode == -signal.SIGKILL
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]
    assert (tmp_path / "report.html").exists(), "the report is there while the run goes on"
    recorded(tmp_path, range(2, 4))
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]


def test_the_rollouts_of_a_step_can_be_verified(tmp_path: Path) -> None:
    recorded(tmp_path, range(1))
    path = tmp_path / "rollouts" / "step_00000.jsonl"
    assert verify_file(path).ok
    (line,) = map(json.loads, path.read_text().splitlines())
    line["samples"][0]["tokens"][-1] += 1
    path.write_text(json.dumps(line) + "\n")
    assert not verify_file(path).ok


def test_the_rollouts_stay_within_their_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = len(json.dumps(group_body("s0", "add", [CALL, "no"], [1.0, 0.0])))
    limit = 12 * size
    recorded(tmp_path, range(20), rollouts_limit=limit)
    kept = sorted((tmp_path / "rollouts").iterdir())
    assert sum(path.stat().st_size for path in kept) <= limit
    assert kept[0].name == "step_00000.jsonl"
    assert kept[-1].name == "step_00019.jsonl"
    assert 2 < len(kept) < 20
    assert "the rollouts of the oldest steps are deleted" in caplog.text
    assert [line["step"] for line in lines(tmp_path)] == list(range(20)), "the figures are of all steps"
    recorded(tmp_path / "none", range(2), rollouts_limit=0)
    assert not (tmp_path / "none" / "rollouts").exists()


def test_a_group_that_is_too_large_is_kept_as_figures_and_counts_as_undelivered(tmp_path: Path) -> None:
    bodies = [group_body(f"g{at}", "q", [CALL, "no" * size], [1.0, 0.0]) for at, size in enumerate((1, 4000))]
    with TrainingRecorder(tmp_path, decode=decode, rollouts_limit=80_000) as recorder:
        recorder.step(step(0, [trained(body) for body in bodies]))
    small, large = map(json.loads, (tmp_path / "rollouts" / "step_00000.jsonl").read_text().splitlines())
    assert "shortened" not in small
    assert large["samples"] == []
    assert large["scores"] == [1.0, 0.0]
    totals = verify_file(tmp_path / "rollouts" / "step_00000.jsonl")
    assert totals.ok
    assert totals.undelivered == 8001 + len(CALL) + 1
    assert "over the limit of the rollouts" in (tmp_path / "report.html").read_text()


def test_groups_of_stock_environments_and_refused_ones_are_recorded(tmp_path: Path) -> None:
    stock = {
        "tokens": [[1, 104, 105]],
        "masks": [[-100, 104, 105]],
        "scores": [1.0],
        "overrides": None,
        "messages": None,
    }
    sample = SampleRecord(advantage=0.5, sampler_logprobs=[-1, -1], trainer_logprobs=[-1, -1])
    broken = GroupRecord(body={"tokens": "?", "scores": None}, skipped="malformed", detail="tokens is a text")
    odd = {**stock, "messages": [[{"role": "assistant", "tool_calls": [{"id": 1}, None], "content": ["x"]}, "?"]]}
    with TrainingRecorder(tmp_path, decode=decode) as recorder:
        groups = [GroupRecord(body=body, samples=[sample]) for body in (stock, odd)]
        found = recorder.step(step(0, [*groups, broken]))
    assert (found["train/samples"], found["train/skipped/malformed"]) == (2, 1)
    assert "<mark>hi</mark>" in (tmp_path / "report.html").read_text()


# Calls that the parser repaired.


def unlearning(at: int) -> StepRecord:
    """A step of four groups, in which most calls are repaired from the eighth step on."""
    calls = [(int(at >= 8), 1), (0, 1)]
    bodies = [group_body(f"{at}-{n}", "add", [CALL, CALL], [1.0, 0.0], repaired_calls=calls) for n in range(4)]
    return step(at, list(map(trained, bodies)))


def test_the_share_of_repaired_calls_is_that_of_all_rollouts_of_the_step() -> None:
    groups = [
        trained(group_body("g0", "add", [CALL, CALL], [1.0, 0.0], repaired_calls=[(1, 1), (0, 3)])),
        trained(group_body("g1", "add", [CALL, CALL], [1.0, 1.0], repaired_calls=[(2, 2), (0, 0)])),
        trained(group_body("g2", "add", ["no", "idea"], [1.0, 0.0])),
        GroupRecord(body={"scores": [0.5], "overrides": [{"repaired_calls": "3 of 2"}], "tokens": [[1]]}, skipped="x"),
    ]
    found = step_metrics(step(0, groups))
    assert found["train/repaired_call_rate"] == 3 / 6
    assert found["repaired_calls"] == [[1, 4], [2, 2], [0, 0], [0, 0]]
    assert "train/repaired_call_rate" not in step_metrics(step(0, groups[2:])), "no parser of ours read a call"


def test_a_rollout_of_several_samples_counts_its_calls_once() -> None:
    body = group_body("g", "add", [CALL, CALL], [1.0, 0.0], repaired_calls=[(1, 2), (0, 2)])
    twice = {name: [value[0], *value] for name, value in body.items() if isinstance(value, list)}
    assert step_metrics(step(0, [trained({**body, **twice})]))["repaired_calls"] == [[1, 4]]


def test_a_rising_share_of_repaired_calls_is_an_alarm_once_in_the_console_and_in_the_report(tmp_path: Path) -> None:
    told = io.StringIO()
    with TrainingRecorder(tmp_path, console=Console(file=told, width=200)) as recorder:
        for at in range(16):
            recorder.step(unlearning(at))
    (alarm,) = (line for line in told.getvalue().splitlines() if line.startswith("alarm: "))
    assert "calls repaired by the parser: from 0.0%" in alarm
    alarms = [line["train/repaired_calls_alarm"] for line in lines(tmp_path)]
    assert alarms == sorted(alarms) and (alarms[8], alarms[-1]) == (0, 1)
    page = Page((tmp_path / "report.html").read_text())
    assert "Alarm: calls repaired by the parser: from 0.0%" in page.text
    assert "Calls repaired by the parser: 32 of 128, 25.0%." in page.text
    assert "repaired calls 50.0%" in told.getvalue()


def test_a_resumed_run_still_knows_how_many_calls_were_repaired_before(tmp_path: Path) -> None:
    with TrainingRecorder(tmp_path) as recorder:
        for at in range(10):
            recorder.step(unlearning(at))
    with TrainingRecorder(tmp_path, first_step=8) as recorder:
        for at in range(8, 16):
            recorder.step(unlearning(at))
    assert [line["train/repaired_calls_alarm"] for line in lines(tmp_path)][-1] == 1
    assert "Alarm:" in (tmp_path / "report.html").read_text()


# Progress.


def test_progress_says_a_line_a_step_where_there_is_no_terminal(tmp_path: Path) -> None:
    told = io.StringIO()
    recorded(tmp_path, range(2), console=Console(file=told, width=200))
    first, second = told.getvalue().splitlines()
    assert first.startswith("step 0: reward 0.500, KL 0, entropy 0.500, staleness 0.0")
    assert second.startswith("step 1: ")


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_says_how_long_it_takes_once_there_are_enough_steps(terminal: bool) -> None:
    """A resumed run: the 50 steps before it were not made in no time."""
    moments, told = iter(range(0, 10_000, 600)), io.StringIO()
    console = Console(file=told, force_terminal=terminal, width=140)
    with TrainingProgress(console, "run", 100, lambda: float(next(moments))) as progress:
        for number in range(51, 55):
            assert " left" not in told.getvalue()
            progress.show({"step": number, "train/loss": 2.5})
    assert "about 7 h 40 min left" in told.getvalue()


def test_progress_on_a_terminal_shows_the_figures_that_there_are(tmp_path: Path) -> None:
    told = io.StringIO()
    console = Console(file=told, force_terminal=True, width=120)
    with TrainingRecorder(tmp_path, total_steps=4, console=console, title="[run]") as recorder:
        recorder.step(step(1, [], loss={"loss": 2.5}, tokens=10, seconds={"train": 2.0}))
    assert "loss" in told.getvalue()
    assert "reward" not in told.getvalue()
    assert "[run]" in told.getvalue()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_progress_shows_the_figures_that_a_terminal_has_room_for(width: int) -> None:
    told = io.StringIO()
    console = Console(file=told, force_terminal=True, width=width)
    line = {"step": 12_345, **{key: 0 if form == "{:d}" else 1234.5678 for _, key, form in FIGURES}}
    with TrainingProgress(console, "a run", 20_000) as progress:
        progress.show(line)
    printed = Text.from_ansi(told.getvalue()).plain
    assert "…" not in printed and all(len(each.rstrip()) <= width for each in printed.splitlines())
    assert "1234.568" in printed and "12345/20000" in printed
    assert ("queue" in printed) == (width >= 120), "the last figure"


# The report.

ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "main", "h1", "h2", "div", "section", "span", "b", "i", "p"),
    *("svg", "line", "text", "path", "circle", "rect", "details", "summary", "pre", "mark", "code"),
    *("article", "header", "table", "tr", "th", "td"),
}


class Page(HTMLParser):
    """Tags, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_what_a_model_writes_cannot_break_the_report(tmp_path: Path) -> None:
    body = group_body("g", HOSTILE.replace("\ud83d", ""), [HOSTILE.replace("\ud83d", ""), "no"], [1.0, 0.0])
    body["messages"][0][1]["content"] = HOSTILE
    body["messages"][1] = [{"role": HOSTILE, "content": None, "tool_calls": [{"function": {"name": HOSTILE}}]}]
    group = trained(body)
    refused = GroupRecord(body=body, skipped=HOSTILE, detail=HOSTILE)
    with TrainingRecorder(tmp_path, title=HOSTILE, decode=lambda ids: HOSTILE) as recorder:
        recorder.step(step(0, [group, refused]))
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags <= ALLOWED
    assert not {name for name in page.attributes if name.startswith("on")} | page.attributes & {"src", "href"}
    assert "alert(1)" in page.text
    assert "{{ 7 * 7 }}" in page.text


def test_the_report_shows_curves_and_each_steps_rollouts(tmp_path: Path) -> None:
    with TrainingRecorder(tmp_path, decode=decode) as recorder:
        for at in range(3):
            body = group_body(f"s{at}", "add", [CALL, "no"], [1.0, at / 4], p=-0.5 - at)
            recorder.step(step(at, [trained(body, drift=at / 8, staleness=at)]))
    text = (tmp_path / "report.html").read_text()
    assert len(re.findall('class="line s1 dashed"', text)) == 3, "those of the trainer, of k1 and of the largest"
    for title in ("Reward", "Logprobs of the trained tokens", "KL of sampler and trainer", "Entropy", "Staleness"):
        assert f'aria-label="{title}"' in text
    phone = re.findall('class="short" viewBox="0 0 520 210" role="img" aria-label="(.*?)"', text)
    assert phone == ["Reward"], "the wide one is drawn again for narrow screens, where its labels would be too small"
    assert 'aria-label="Clip share"' not in text, "a loss without bounds clips nothing"
    page = Page(text)
    for at in range(3):
        assert f"step {at}" in page.text
    assert "advantage +0.375" in page.text
    assert "calls add" in " ".join(page.text.split())
    assert "<mark>" in text


def test_what_never_changes_is_a_figure_and_no_curve(tmp_path: Path) -> None:
    recorded(tmp_path, range(3))
    text = (tmp_path / "report.html").read_text()
    assert 'aria-label="Reward"' not in text and 'aria-label="Outcomes"' not in text and 'aria-label="Time"' not in text
    points = text.partition("<h2>Figures that never changed</h2>")[2].partition("</table>")[0]
    assert '<th class="text">Reward</th><td><b>0.5 [' in points
    assert '<th class="text">Outcomes</th><td>completed <b>2</b> <span class="dim">rollouts</span>' in points
    (tmp_path / "once").mkdir()
    same: dict[str, Any] = {"train/entropy": 0.5}
    run = [reward_line(1, 0.25, **same), reward_line(2, 0.5, **same, **{"train/loss": 2.0})]
    text = report_of(tmp_path / "once", run)
    assert "Figures that never changed Losstraining 2 of one step" in text and "Entropy0.5 nats per token" in text


def test_the_report_colours_by_reward_counts_rollouts_from_0_and_has_the_settings(tmp_path: Path) -> None:
    good = group_body("g", "add", [CALL, "no"], [0.983, 1.0])
    parts = group_body("h", "add", [CALL, "no", "2"], [0.0, 0.0, 1.0]) | {"scores": [0.0, None, 1e300]}
    for at, name in enumerate(("a", "a", "b")):
        parts["overrides"][at]["lachesis"]["rollout_id"] = name
    with TrainingRecorder(tmp_path) as recorder:
        recorder.step(step(0, [trained(good), GroupRecord(body=parts, skipped="unproven")]))
        recorder.step(step(1, [trained(good)]))
        (tmp_path / "checkpoint.json").write_text(
            '{"settings": {"training.learning_rate": 0.5, "training.none": null, "sent": [{"rate": [1, true]}, {}]}}'
        )
    text = (tmp_path / "report.html").read_text()
    assert re.findall('<summary><span class="dim">(\\d)</span>', text) == ["0", "0", "1"], "groups, too"
    cells = re.findall('<span class="cell (\\w+)" title="(.*?)">(.*?)</span>', text)
    assert cells[:2] == [("r9", "rollout 0", "0.98"), ("r10", "rollout 1", "1")], "none is below the mean and red"
    names = ["rollout 0, sample 0", "rollout 0, sample 1", "rollout 1"]
    assert [name.partition(", not")[0] for _, name, _ in cells[4:]] == names
    assert [kind for kind, *_ in cells[4:]] == ["r0", "none", "none"], "what is no reward has no colour"
    assert (
        '<th class="text">training.learning_rate</th><td class="text pre">0.5</td>' in text
        and "training.none" not in text
    )
    assert '<th class="text">sent.0.rate</th><td class="text pre">1, true</td>' in text, "no JSON"


def reward_line(at: int, reward: float, **more: Any) -> dict[str, Any]:
    ends = {"train/reward_low": reward - 0.1, "train/reward_high": reward + 0.2}
    return {"step": at, "timestamp": 100.0 * at, "train/step_time": 90.0, "train/reward": reward, **ends, **more}


def report_of(folder: Path, lines_of: list[dict[str, Any]], **more: Any) -> str:
    """The text of the report of a run with these lines."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines_of))
    return " ".join(Page(report_module.write_report(folder, **more).read_text()).text.split())


def test_the_report_begins_with_what_was_trained_and_what_its_figures_say(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text('{"settings": {"base_model": "smollm2"}}')
    for at, mean in ((0, 0.25), (5, 0.5), (10, 0.75)):
        (path := tmp_path / f"eval/step-{at}/metrics.json").parent.mkdir(parents=True)
        figures = {"eval/avg_reward": mean, "eval/avg_reward_low": mean - 0.05, "eval/avg_reward_high": mean + 0.05}
        path.write_text(json.dumps({"results": {"all": figures}}))
    run = [reward_line(at, 0.2 + 0.04 * at, **{"train/count/share": 1.0}) for at in range(1, 11)]
    text = report_of(tmp_path, run, title="demo", total_steps=12)
    assert "count · smollm2 · 10 of 12 steps demo" in text and "last step" not in text, "it is said once"
    assert "10 of 12 steps as of" in report_of(tmp_path, run, title="count", total_steps=12), "as is the name"
    # Of two steps with distances of 0.1 below and 0.2 above: their root of squares, halved.
    low, high = math.sqrt(2) * 0.1 / 2, math.sqrt(2) * 0.2 / 2
    first, last = (f"{mean:.3f} [{mean - low:.3f}, {mean + high:.3f}]" for mean in (0.26, 0.58))
    assert f"Mean reward: {first} in the first 2 steps, {last} in the last 2 steps; the difference is +0.320 [" in text
    held_out = (
        "0.250 [0.200, 0.300] at step 0, 0.750 [0.700, 0.800] at step 10; the difference is +0.500 [+0.429, +0.571]."
    )
    assert f"Mean reward on held-out items: {held_out}" in text
    assert "0.25 → 0.75mean reward on held-out items, steps 0 and 10; the last one [0.7, 0.8]" in text
    assert f"lachesis export --run-dir {tmp_path} --to {tmp_path.name}_model" in text
    (tmp_path / "next.json").write_text('[["eval count.py:Count -m x.gguf", "plays it"]]')
    text_of_train = report_of(tmp_path, run)
    assert "lachesis eval count.py:Count -m x.gguf plays it" in text_of_train and "export" not in text_of_train
    near = report_of(tmp_path / "near", [reward_line(1, 0.3), reward_line(2, 0.35)])
    assert "0.300 [0.200, 0.500] at step 1, 0.350 [0.250, 0.550] at step 2; " in near
    assert "the difference is +0.050 [-0.174, +0.274], which includes 0." in near
    assert "lachesis export" not in near, "there is no checkpoint"


def test_the_only_step_is_a_table_with_its_interval(tmp_path: Path) -> None:
    text = report_of(tmp_path, [reward_line(1, 0.25, **{"train/loss": 0.5, "time/wait": 2.0})])
    page = (tmp_path / "report.html").read_text()
    assert "Mean reward: 0.250 [0.150, 0.450] at step 1." in text
    assert "<svg" not in page and "Figures of a single step" in text
    assert '<th class="text">Reward</th><td><b>0.25 [0.15, 0.45]</b>' in page
    assert "step 1: mean of the groups 0.25 [0.15, 0.45]" in report_of_two(tmp_path / "two")


def report_of_two(folder: Path) -> str:
    report_of(folder, [reward_line(1, 0.25), reward_line(2, 0.5)])
    return (folder / "report.html").read_text()


def test_the_report_tells_of_the_warm_start_and_of_groups_that_were_not_sent(tmp_path: Path) -> None:
    for name in ("warm-start", "spool/one", "spool/two"):
        (tmp_path / name).mkdir(parents=True)
    warm = [
        {"step": 0, "train/tokens": 0},
        *({"step": at, "train/loss": 2.0 / at, "train/samples": 4} for at in (1, 2)),
    ]
    (tmp_path / "warm-start/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in warm))
    for name, reasons in (("one", ["same scores", "too old"]), ("two", ["same scores"])):
        lines_of = "".join(json.dumps({"key": "k", "reason": reason}) + "\n" for reason in reasons)
        (tmp_path / "spool" / name / "refused.jsonl").write_text(lines_of)
    text = report_of(tmp_path, [reward_line(1, 0.2)])
    assert "Warm start: 2 steps on rollouts of the reference policy. Loss: 2.000 at step 1, 1.000 at step 2." in text
    assert "Groups that were not sent to the trainer: 2 same scores, 1 too old." in text
    (tmp_path / "warm-start/metrics.jsonl").write_text('{"step": 1, "tra\n{"step": 2}\n')
    (tmp_path / "spool/two/refused.jsonl").write_text('[1]\n{"rea\n{}\n')
    text = report_of(tmp_path, [reward_line(1, 0.2)])
    assert "Warm start" not in text and "1 same scores, 1 too old." in text, "files that are damaged end no run"


def test_the_labels_of_an_axis_differ_and_have_room(tmp_path: Path) -> None:
    for values in ([-2.2735675, -2.2735671], [5.3e-7, -4.1e-7], [1e6, 1e6 + 3], [0.1, 0.9]):
        chart = line_chart("t", [1, 2], [Line("x", values)])
        assert chart is not None
        shown = [float(text.replace(",", "")) for _, text in chart.y_ticks]
        steps = [after - before for before, after in pairwise(shown)]
        assert min(steps) > 0 and max(steps) - min(steps) < 0.2 * max(steps), shown
        widest = max(len(text) for _, text in chart.y_ticks)
        assert chart.left - 6 >= 8 * widest, "of letters as a phone has them"
        assert all(chart.left <= point[0] <= chart.width - 18 for series in chart.series for point in series.points)


def test_a_long_run_has_a_report_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "MAX_STEPS", 5)
    monkeypatch.setattr(report_module, "MAX_CHARACTERS", 10)
    with TrainingRecorder(tmp_path, decode=decode) as recorder:
        for at in range(12):
            bodies = [group_body(f"{at}-{name}", "add", [CALL, "no"], [1.0, 0.0]) for name in "ab"]
            recorder.step(step(at, [trained(body) for body in bodies]))
    page = Page((tmp_path / "report.html").read_text()).text
    assert "5 of 12 steps are shown here" in page
    assert "The first 1 of 2 groups; the others are in rollouts/step_00011.jsonl" in page


def test_the_report_of_a_folder_can_be_written_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path, range(2))
    before = (tmp_path / "report.html").read_text()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "again.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "again.html")
    again = (tmp_path / "again.html").read_text()
    assert re.sub("as of [^<]*|<title>.*|<h1>.*", "", again) == re.sub("as of [^<]*|<title>.*|<h1>.*", "", before)
    recorded(tmp_path / "runs/one", range(2))
    assert main(["report", str(tmp_path / "runs")]) != 0
    assert f"name one of its runs: {tmp_path / 'runs/one'}" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) != 0
    assert "has no groups.jsonl, samples.jsonl, metrics.jsonl; name the folder of a run" in capsys.readouterr().err


def test_the_report_of_a_run_on_files_counts_its_examples_and_has_no_rollouts(tmp_path: Path) -> None:
    with TrainingRecorder(tmp_path) as recorder:
        recorder.step(step(0, [], tokens=0))
        for at in (1, 2):
            recorder.step(step(at, [], tokens=500, samples=6, loss={"loss": 3.0 - at}))
    assert not list((tmp_path / "rollouts").glob("*")), "no file where there is no group"
    (tmp_path / "rollouts").mkdir(exist_ok=True)
    (tmp_path / "rollouts/step_00001.jsonl").touch()  # as an earlier version wrote it
    page = " ".join(Page(report_module.write_report(tmp_path).read_text()).text.split())
    assert (
        "trained on files" in page
        and "12examples trained, from files" in page
        and "Loss: 2.000 at step 1, 1.000 at step 2." in page
    )
    assert "Rollouts of each step" not in page and "skipped" not in page and "0 groups" not in page


def test_an_empty_run_has_a_report_that_says_so(tmp_path: Path) -> None:
    TrainingRecorder(tmp_path).close()
    assert "No step has been recorded." in (tmp_path / "report.html").read_text()


# Charts.


def test_a_line_of_many_steps_is_drawn_with_means() -> None:
    chart = line_chart("t", range(1000), [Line("x", [float(at) for at in range(1000)])])
    assert chart is not None
    assert chart.steps_per_point == 4
    assert len(chart.series[0].points) == 250
    assert chart.series[0].points[0][2] == "step 1.5: x 1.5"
    assert chart.legend[0][2] == "999", "the last value, not the last mean"


def test_a_line_has_gaps_where_a_step_has_no_value() -> None:
    assert line_chart("t", [0, 1], [Line("x", [None, None])]) is None
    chart = line_chart("t", [0, 1, 2], [Line("x", [1.0, None, 1.0])])
    assert chart is not None
    assert [text for *_, text in chart.series[0].points] == ["step 0: x 1", "step 2: x 1"]
    assert chart.y_ticks[0][1] != chart.y_ticks[-1][1], "equal values have a range"


def test_bars_are_as_high_as_their_counts() -> None:
    chart = bar_chart("t", [0, 1], [{"a": 2.0, "b": 1.0}, {"a": 4.0}])
    assert chart is not None
    heights = {text: height for _, _, _, height, _, text in chart.bars}
    assert heights["step 0: a 2"] == pytest.approx(2 * heights["step 0: b 1"], abs=0.2)
    assert heights["step 1: a 4"] == pytest.approx(2 * heights["step 0: a 2"], abs=0.2)
    assert bar_chart("t", [0], [{}]) is None
    mixed = [{"max_turns": 3, "infra_error": 2, "completed": 1}]
    outcomes = bar_chart("t", [0], mixed, kind=ended)
    assert outcomes is not None
    colours = [(name, colour) for name, colour, _ in outcomes.legend]
    assert colours == [("completed", "done"), ("max turns", "cut"), ("infra error", "broke")], "as in the viewer"


def test_numbers_have_about_three_digits() -> None:
    shown = {0.0: "0", 1.0: "1", 0.12345: "0.123", 12345.6: "12,346", 2.5e-5: "2.5e-5", -0.5: "-0.5", 3e9: "3e+09"}
    assert {value: number(value) for value in shown} == shown


# W&B.


@pytest.mark.slow
def test_wandb_gets_the_same_figures_and_a_resumed_run_continues_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    settings = WandbSettings(project="p", group="g")
    recorded(tmp_path / "run", range(2), wandb=settings)
    run_id = (tmp_path / "run" / "wandb_run_id").read_text()
    recorded(tmp_path / "run", range(2, 3), wandb=settings)
    assert (tmp_path / "run" / "wandb_run_id").read_text() == run_id
    # offline-run-DATE_TIME-ID; two runs that begin in the same second get -1 at the end of the second's name.
    assert {path.name.split("-")[3] for path in tmp_path.glob("wandb/offline-run-*")} == {run_id.strip()}
    sent = logged(tmp_path)
    expected = lines(tmp_path / "run")
    assert [float(json.loads(step["train/reward"])) for step in sent] == [line["train/reward"] for line in expected]
    assert {name for name in sent[0] if "/" in name} == {name for name in expected[0] if "/" in name}
