"""Rehearsals: known cases, the real rules of pace, virtual time, the command line."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from backends.errors import SettingsError
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.rehearsal.fleet import SimulatedTurn, Workload, recorded_workload
from lachesis_train.rehearsal.play import RehearsalMark, RehearsalPlan, rehearse, result_of
from lachesis_train.rehearsal.virtual_time import run_in_virtual_time
from lachesis_train.rollout_api_sink import RolloutApiSink
from lachesis_train.verbs import train
from lachesis_train.verbs.rehearse import advice, cuts

ONE_TURN = Workload((1, 1), (100, 100), (0, 0))


def plan(*, work: Workload = ONE_TURN, env: dict[str, Any] | None = None, **facts: Any) -> RehearsalPlan:
    """One server with 8 places, on which a request takes a second; batches of 4 groups of 4."""
    config = HermesAgentEnvConfig(**{"group_size": 4, "max_num_workers": 8, "max_batches_offpolicy": 4, **(env or {})})
    given = {"places": 8, "tokens_per_second": 800.0, "latency": (0.0, 0.0), "step_seconds": 0.5, **facts}
    return RehearsalPlan(config, 16, work, **given)


def test_a_full_server_gives_exactly_its_rollouts() -> None:
    found = rehearse(plan())
    assert found.rollouts_per_second == pytest.approx(8.0)
    assert found.tokens_per_second == pytest.approx(800.0)
    assert found.servers_idle == pytest.approx(0.0)
    assert found.limit == "env.max_num_workers"


def test_a_trainer_that_is_never_without_a_batch_sets_the_pace() -> None:
    found = rehearse(plan(step_seconds=20.0))
    assert found.trainer_waits == pytest.approx(0.0)
    assert found.rollouts_per_second == pytest.approx(16 / 20)
    assert found.batches_per_hour == pytest.approx(180)
    assert rehearse(plan(step_seconds=10.0, trained_per_second=160.0)).batches_per_hour == pytest.approx(180)


def test_requests_in_flight_are_their_rate_times_their_duration() -> None:
    found = rehearse(plan(places=64, tokens_per_second=6400.0, latency=(0.0, 1.0), steps=200))
    busy = (1 - found.servers_idle) * 64
    requests = found.tokens_per_second / 100
    assert busy == pytest.approx(requests * 1.5, rel=0.03)


def test_the_same_seed_plays_the_same_run_and_another_one_does_not() -> None:
    drawn = Workload((1, 5), (10, 200), (0.0, 2.0))
    first = rehearse(plan(work=drawn))
    assert rehearse(plan(work=drawn)) == first
    assert rehearse(plan(work=drawn, seed=1)) != first


def test_virtual_time_waits_for_nothing_and_refuses_to_wait_for_ever() -> None:
    async def centuries() -> float:
        await asyncio.gather(*(asyncio.sleep(seconds) for seconds in (1e9, 3e9, 2e9)))
        assert await asyncio.to_thread(lambda: 7) == 7
        return asyncio.get_running_loop().time()

    assert run_in_virtual_time(centuries()) == pytest.approx(3e9)
    with pytest.raises(RuntimeError, match="no timer is left"):
        run_in_virtual_time(asyncio.Event().wait())


SLOW = Workload((1, 1), (10, 10), (0, 0), recorded=[[[SimulatedTurn(10, 0.0)]]] * 9 + [[[SimulatedTurn(10, 60.0)]]])


def test_the_sinks_own_rule_decides_what_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    drop = {"max_staleness": 2, "when_stale": "drop"}
    found = rehearse(plan(work=SLOW, env=drop))
    assert found.too_old > 0.05
    assert found.oldest <= 2
    monkeypatch.setattr(RolloutApiSink, "_why_too_old", lambda *_: "")
    assert rehearse(plan(work=SLOW, env=drop)).too_old == 0


def test_wait_keeps_its_bound_and_the_trainer_pays_for_it() -> None:
    tight, loose = (rehearse(plan(work=SLOW, env={"max_staleness": most})) for most in (2, 30))
    assert tight.oldest <= 2 < loose.oldest
    assert tight.too_old == loose.too_old == 0
    assert tight.trainer_waits > loose.trainer_waits
    assert tight.limit == "env.max_staleness"


def test_a_limit_on_the_lag_of_weights_leaves_sequences_out() -> None:
    assert rehearse(plan(step_seconds=4.0, max_policy_lag=0)).too_old > 0
    assert rehearse(plan(step_seconds=4.0)).too_old == 0


def test_groups_without_a_signal_and_long_sequences_are_not_trained() -> None:
    assert rehearse(plan(work=Workload((1, 1), (100, 100), (0, 0), equal=0.5))).without_signal == pytest.approx(
        0.5, abs=0.1
    )
    some = [[[SimulatedTurn(100, 0.0)]], [[SimulatedTurn(300, 0.0)]]]
    long = Workload((1, 1), (1, 1), (0, 0), recorded=some)
    assert rehearse(plan(work=long, max_token_len=200)).too_long == pytest.approx(0.5, abs=0.15)


EQUAL = Workload((1, 1), (100, 100), (0, 0), equal=0.995)
ENDLESS = Workload((1, 1), (100, 100), (1e9, 1e9))


@pytest.mark.parametrize(
    ("facts", "ended", "first"),
    [
        (
            {"max_token_len": 50},
            "160 groups were played, 10 times as many as",
            "100% of groups have a sequence that is",
        ),
        ({"work": EQUAL}, "160 groups were played, 10 times as many as", "(99|100)% of groups have equal rewards"),
        (
            {"work": EQUAL, "env": {"max_equal_groups": 8}},
            "nothing is left to learn: 8 groups",
            "100% of groups have eq",
        ),
        (
            {"work": ENDLESS, "env": {"rollout_timeout": None}},
            "waited 1 hours for a batch",
            "the trainer waits 100% of",
        ),
    ],
)
def test_a_run_that_the_trainer_gets_too_little_of_ends_and_says_why(
    facts: dict[str, Any], ended: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis_train.rehearsal.play.LONGEST_WAIT", 3600.0)
    synced: list[int] = []
    monkeypatch.setattr("os.fsync", synced.append)
    played = plan(steps=4, **facts)
    found = rehearse(played)
    assert found.steps < 4
    assert len(synced) <= 1, "a group that is left out waits for no disk"
    assert ended in found.ended
    assert re.match(f"Change first: {first}", advice(played, found))


@pytest.mark.parametrize("batches", [0, 1, 2, 3])
def test_figures_up_to_an_early_end_need_no_batches(batches: int) -> None:
    marks = [RehearsalMark(10.0 * at, at, waited=10.0 * at) for at in range(batches + 1)]
    end = RehearsalMark(10.0 * batches + 5, batches, waited=10.0 * batches + 5)
    found = result_of(plan(), [*marks, end], 1, "stopped")
    assert (found.steps, found.ended, found.trainer_waits) == (batches, "stopped", 1.0)
    assert found.batches_per_hour == pytest.approx(3600 * max(0, batches - 1) / found.seconds)


def test_the_work_of_an_earlier_run_is_read(tmp_path: Path) -> None:
    rollout = {"turns": 2, "completion_tokens": 31, "seconds_in_tools": 4.0, "seconds_own": 9.0}
    groups = [{"scores": scores, "rollouts": [rollout, {"turns": 0}]} for scores in ([0.0, 1.0], [1.0, 1.0])]
    path = tmp_path / "groups.jsonl"
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    work = recorded_workload(path)
    assert work.recorded == [[[SimulatedTurn(16, 2.0), SimulatedTurn(15, 2.0)]]] * 2
    assert work.equal == 0.5
    assert work.record_bytes == path.stat().st_size / 62


@pytest.mark.parametrize("text", ["not json\n", "{}\n", "[]\n", ""])
def test_a_file_that_is_no_groups_file_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=r"--like .*other\.jsonl"):
        recorded_workload(path)


ARGUMENTS = ("--rehearse", "--env", "tool_call", "--trainer-seconds", "5", "--env.group_size", "4")


def test_the_command_prints_figures_and_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main([*ARGUMENTS, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rollouts_per_second"] == pytest.approx(32 / 5, rel=0.05)
    assert found["advice"].startswith("Change first: the trainer is busy")
    assert train.main(ARGUMENTS) == 0
    assert "Change first: the trainer is busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--servers", "0"),
        ("--servers", "2-3"),
        ("--latency", "3-1"),
        ("--tokens", "0"),
        ("--turns", "many"),
        ("--tokens-per-second", "0"),
        ("--equal-groups", "1"),
        ("--prompt-tokens", "-1"),
    ],
)
def test_bad_flags_are_refused_before_anything_runs(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.main([*ARGUMENTS, f"{flag}={value}"])
    assert flag in capsys.readouterr().err


def test_batches_that_whole_groups_do_not_fill_are_refused() -> None:
    with pytest.raises(SettingsError, match=r"not a multiple of env\.group_size"):
        train.main([*ARGUMENTS, "--env.batch_size", "6"])


def test_settings_that_cut_the_given_turns_and_tokens_are_named() -> None:
    work = Workload((1, 4), (50, 400), (0, 0))
    assert cuts(plan(work=work, env={"max_token_length": 64, "max_agent_turns": 4})) == [
        "env.max_token_length 64 cuts tokens of a turn (50 to 400)"
    ]
