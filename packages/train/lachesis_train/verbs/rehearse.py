"""`lachesis train --rehearse`: what the settings of a run will give, simulated in virtual time on this machine.

The pipeline and the rules that pace it are those of a real run; model servers, tools and the trainer are simulated from
the figures given here. Nothing is started, sampled or trained, and no GPU is needed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from backends.errors import SettingsError
from lachesis.cli.verb_parser import ENVIRONMENT, VerbParser
from lachesis.runs.prose import print_table
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_train.rehearsal.fleet import Span, Workload, recorded_workload
from lachesis_train.rehearsal.play import RehearsalPlan, RehearsalResult, rehearse
from lachesis_train.trainer.settings import Settings

MUCH: Final = 0.1
"""The share of idle time above which something is worth changing."""
MOST_STEPS: Final = 40


def rehearsal_plan(given: argparse.Namespace, config: HermesAgentEnvConfig, settings: Settings) -> RehearsalPlan:
    """What is played.

    Raises:
        SettingsError: a setting, or a file, with which nothing can be played.
    """
    sequences, size = settings.env.sequences, config.group_size
    if sequences % size:
        raise SettingsError(
            f"env.batch_size {sequences} is not a multiple of env.group_size {size}: a rehearsal forms batches of "
            "whole groups; set one of them"
        )
    if len(settings.environments) > 1:
        raise SettingsError("environments: a rehearsal simulates one environment; name it with --env")
    work = Workload(given.turns, given.tokens, given.tool_seconds, given.equal_groups)
    if given.like is not None:
        work = recorded_workload(given.like)
    return RehearsalPlan(
        config=config,
        batch_size=sequences,
        work=work,
        servers=given.servers,
        places=given.requests_per_server,
        tokens_per_second=given.tokens_per_second,
        latency=given.latency,
        step_seconds=given.trainer_seconds,
        trained_per_second=given.trainer_tokens_per_second,
        prompt_tokens=given.prompt_tokens,
        max_token_len=settings.training.max_token_trainer_length,
        max_policy_lag=settings.training.max_policy_lag,
        steps=max(4, min(settings.num_steps, MOST_STEPS)),
        seed=given.seed,
    )


def show_rehearsal(plan: RehearsalPlan, console: Console, *, as_json: bool) -> None:
    """Play the plan and print what it gives."""
    found = rehearse(plan)
    if as_json:
        print(json.dumps({**asdict(found), "cuts": cuts(plan), "advice": advice(plan, found)}))
        return
    table = Table(
        title=f"{found.steps} of {plan.steps} steps in virtual time, the first quarter not counted", show_header=False
    )
    for name, text in (
        ("throughput", f"{found.rollouts_per_second:.2f} rollouts/s, {found.tokens_per_second:,.0f} tokens/s"),
        ("batches", f"{found.batches_per_hour:.1f} an hour"),
        ("age of groups", f"{found.staleness:.2f} batches on average, at most {found.oldest}"),
        ("places of the servers idle", f"{found.servers_idle:.0%}"),
        ("trainer waits", f"{found.trainer_waits:.0%} of its time"),
        ("thrown away as too old", f"{found.too_old:.1%}"),
        ("left out, no signal or too long", f"{found.without_signal:.1%}, {found.too_long:.1%} of groups"),
        ("groups in flight", f"{found.groups_in_flight} at most"),
        ("memory of the environment (computed)", f"{found.memory_bytes / 1e9:.2f} GB"),
        ("disk (computed)", f"{found.disk_bytes_a_day / 1e9:.1f} GB of records a day"),
    ):
        table.add_row(name, text)
    print_table(console, table)
    early = [f"Ended after {found.steps} of {plan.steps} steps: {found.ended}."] if found.ended else []
    for line in (*early, *cuts(plan), advice(plan, found)):
        console.print(line, markup=False, soft_wrap=True)


def cuts(plan: RehearsalPlan) -> list[str]:
    """The settings that shorten the rollouts that were asked for."""
    limits = (
        ("env.max_token_length", plan.config.max_token_length, "tokens of a turn", plan.work.tokens),
        ("env.max_agent_turns", plan.config.max_agent_turns, "turns of a rollout", plan.work.turns),
    )
    return [
        f"{name} {most} cuts {what} ({low:g} to {high:g})" for name, most, what, (low, high) in limits if high > most
    ]


def advice(plan: RehearsalPlan, found: RehearsalResult) -> str:
    """One sentence: what bounds the run, and what to change first."""
    idle, waits = f"{found.servers_idle:.0%} of the servers' places are idle", f"{found.trainer_waits:.0%}"
    if found.without_signal > 1 - MUCH:
        return (
            f"Change first: {found.without_signal:.0%} of groups have equal rewards and teach nothing; take items that "
            "are neither solved nor too hard."
        )
    if found.too_long > MUCH:
        return (
            f"Change first: {found.too_long:.0%} of groups have a sequence that is too long; raise "
            "training.max_token_trainer_length or lower env.max_token_length or env.max_agent_turns."
        )
    if found.too_old > MUCH / 2:
        return (
            f"Change first: {found.too_old:.0%} are thrown away as too old; raise env.max_staleness or "
            "training.max_policy_lag, or lower env.max_num_workers or env.max_batches_offpolicy."
        )
    if found.trainer_waits <= MUCH:
        enough = max(1, -int(-plan.servers * (1 - found.servers_idle) // 1))
        fewer = f", and about {enough} of {plan.servers} servers would do" if enough < plan.servers else ""
        return (
            f"Change first: the trainer is busy {1 - found.trainer_waits:.0%} of the time; speed it up ({idle}{fewer})."
        )
    if found.servers_idle <= 2 * MUCH:
        return f"Change first: the trainer waits {waits} of the time and the servers are busy; add servers."
    if found.limit == "env.max_staleness":
        return f"Change first: the trainer waits {waits} of the time for slow groups ({idle}); raise env.max_staleness."
    return f"Change first: the trainer waits {waits} of the time while {idle}; raise {found.limit}."


def rehearsal_parser() -> argparse.ArgumentParser:
    """Of the flags of a rehearsal; others are settings."""
    parser = VerbParser(
        prog="lachesis train --rehearse",
        description=__doc__,
    )
    add = parser.add_argument
    add("--rehearse", action="store_true", help="simulate the run in virtual time, and start nothing")
    add("--env", metavar="ENV", required=True, help=f"the environment whose settings are read: {ENVIRONMENT}")
    add("--config", metavar="FILE", help="the YAML file of the run")
    add("--servers", type=_whole, default=1, metavar="N", help="model servers (default: 1)")
    add("--requests-per-server", type=_whole, default=64, metavar="N", help="at once; others wait (default: 64)")
    add("--tokens-per-second", type=_positive, default=2000.0, metavar="T", help="of a full server (default: 2000)")
    add("--latency", type=_span, default=(0.5, 0.5), metavar="S[-S]", help="seconds to the first token (default: 0.5)")
    add("--like", type=Path, metavar="FILE", help="turns, tokens, tool seconds of an earlier run's groups.jsonl")
    add("--turns", type=_span_of_whole, default=(1, 4), metavar="N[-M]", help="of a rollout (default: 1-4)")
    add("--tokens", type=_span_of_whole, default=(50, 400), metavar="N[-M]", help="of a turn (default: 50-400)")
    add("--tool-seconds", type=_span, default=(0.0, 1.0), metavar="S[-S]", help="after a turn (default: 0-1)")
    add("--prompt-tokens", type=_tokens, default=0, metavar="N", help="of a rollout, not sampled (default: 0)")
    add("--equal-groups", type=_share, default=0.0, metavar="P", help="share of groups without a signal (default: 0)")
    add("--trainer-seconds", type=_positive, default=30.0, metavar="S", help="of a step (default: 30)")
    add("--trainer-tokens-per-second", type=_positive, metavar="T", help="adds the time of a step's tokens")
    add("--seed", type=int, default=0, help="of all chance (default: 0)")
    add("--json", action="store_true", help="print one JSON object; times in seconds, shares from 0 to 1")
    return parser


def _span(text: str) -> Span:
    low, _, high = text.partition("-")
    try:
        found = float(low), float(high or low)
    except ValueError:
        found = (1.0, 0.0)
    if not 0 <= found[0] <= found[1] < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a range; write 2, or 0.5-3 with the larger number last")
    return found


def _span_of_whole(text: str) -> Span:
    low, high = _span(text)
    if low < 1 or low % 1 or high % 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of whole numbers from 1; write 4, or 50-400")
    return low, high


def _positive(text: str) -> float:
    low, high = _span(text)
    if not low == high > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be one number above 0")
    return low


def _whole(text: str) -> int:
    low, high = _span_of_whole(text)
    if low != high:
        raise argparse.ArgumentTypeError(f"{text!r} must be one whole number")
    return int(low)


def _tokens(text: str) -> int:
    low, high = _span(text)
    if low != high or low % 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be one whole number")
    return int(low)


def _share(text: str) -> float:
    low, high = _span(text)
    if low != high or not 0 <= low < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a share from 0 to below 1")
    return low
