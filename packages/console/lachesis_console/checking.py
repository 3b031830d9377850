"""Mistakes of an environment that show without a model: its reference policy must earn full marks, and policies that do
nothing or call tools at random must earn nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.text import counted
from lachesis.authors import defined_at
from lachesis.base_env import HermesAgentBaseEnv
from lachesis_console.auditing.of_environment import SLOW_SANDBOX, SLOW_SETUP
from lachesis_console.auditing.plan import AuditPlan
from lachesis_console.auditing.playing import NO_REFERENCE, NO_SOLUTION, Stage
from lachesis_console.auditing.records import asked_for
from lachesis_tools import BUILTIN_TOOLS


@dataclass(frozen=True, slots=True)
class Played:
    """A policy's rewards."""

    policy: str
    rewards: Mapping[str, Sequence[float | None]]
    """By the title of the item, one for each rollout; None where it has no score."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why rollouts have no score, and how many each reason has."""
    tracebacks: Mapping[str, str] = field(default_factory=dict)
    """By reason, where the author's code raised."""
    looks: Sequence[str] = ()
    """What the reward read in the agent's sandbox."""

    @property
    def by_item(self) -> dict[str, list[float]]:
        """The rewards without those that are None."""
        return {title: [each for each in rewards if each is not None] for title, rewards in self.rewards.items()}

    @property
    def scored(self) -> list[float]:
        return [reward for rewards in self.by_item.values() for reward in rewards]


@dataclass(slots=True)
class CheckReport:
    """The rollouts played and the problems found."""

    played: list[Played] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """Mistakes, or what looks like one."""
    notes: list[str] = field(default_factory=list)
    """Notes for the author, which are right for many environments."""
    code: dict[str, str] = field(default_factory=dict)
    """By finding: the author's lines that an exception went through."""

    def __str__(self) -> str:
        found = [f"{each}\n{self.code[each]}" if each in self.code else each for each in self.findings]
        return "\n".join([*found, *self.notes]) or "nothing suspicious"


async def check_environment(
    env_cls: type[HermesAgentBaseEnv], flags: Sequence[str] = (), *, items: int = 5
) -> CheckReport:
    """Play the reference policy twice for each item, and two policies that should earn nothing. `lachesis audit` plays
    more.

    Args:
        flags: settings as on the command line, such as `["--env.terminal_backend", "docker"]`.
        items: how many items are played.

    Raises:
        SettingsError: settings that cannot be used.
        UnusableSettings: the run cannot continue with them: a judge is missing, or the key of its server is wrong.
        BackendError, InferenceError: the run could not start.
    """
    stage = Stage(env_cls, flags)
    async with stage.started(items):
        await AuditPlan(stage).quick()
    report = CheckReport(findings=list(stage.facts.misspelt))
    if stage.facts.has_reference is False:
        missing = stage.facts.left_out[0]
        is_fact = NO_REFERENCE in missing or NO_SOLUTION in missing
        (report.notes if is_fact else report.findings).append(missing)
    for policy in dict.fromkeys(play.policy for play in stage.plays):
        report.played.append(_played(policy, stage))
    _judge(report)
    report.notes += _undescribed(stage)
    for method, limit in (("setup", SLOW_SETUP), ("setup_sandbox", SLOW_SANDBOX)):
        if (longest := stage.facts.setup.get(method, 0.0)) > limit:
            report.findings.append(
                f"{method}() took {longest:.1f} s: prepare what it needs once, in an image or a cache"
            )
    return report


def _played(policy: str, stage: Stage) -> Played:
    played = [play for play in stage.plays if play.policy == policy]
    rewards: dict[str, list[float | None]] = {}
    digests = stage.facts.digests
    for play in played:
        first = digests.index(digests[play.item])  # items that begin alike may be different ones
        rewards.setdefault(f"item {first}, {stage.facts.items[first][:60]}", []).append(play.reward)
    reasons = Counter(play.reason for play in played if play.reward is None)
    tracebacks = {play.reason: play.traceback for play in reversed(played) if play.traceback}
    # What the prompt asks for has to be read where the agent leaves it.
    looks = [look for play in played for look in play.looks if not asked_for(look, play.words)]
    return Played(policy, rewards, reasons, tracebacks, list(dict.fromkeys(looks)))


def _undescribed(stage: Stage) -> list[str]:
    """A line for each tool of the author's own whose docstring leaves out a parameter."""
    offered = {tool["function"]["name"] for tools in stage.facts.tools for tool in tools}
    own = [tool for name, tool in stage.env.tools.items() if name in offered and name not in BUILTIN_TOOLS]
    missing = {tool: [name for name, (_, field) in tool.declared.items() if not field.description] for tool in own}
    return [
        f"the tool {tool.name!r}{defined_at(tool.function)} does not describe {', '.join(names)}: the model sees a "
        "name and a type; add an `Args:` section to its docstring"
        for tool, names in missing.items()
        if names and tool.schema is None
    ]


def _judge(report: CheckReport) -> None:
    """Add what the rewards show."""
    add = report.findings.append
    for reason in dict.fromkeys(reason for played in report.played for reason in played.reasons):
        who = [played for played in report.played if reason in played.reasons]
        count = sum(played.reasons[reason] for played in who)
        said = f"{' and '.join(played.policy for played in who)}: {counted(count, 'rollout')} without a score: {reason}"
        add(said)
        trace = next((played.tracebacks[reason] for played in who if reason in played.tracebacks), "").rstrip()
        if trace and trace not in report.code.values():
            report.code[said] = trace
    for played in report.played:
        for title, scored in played.by_item.items():
            if played.policy == "reference" and len(set(scored)) > 1:
                listed = " and ".join(f"{reward:g}" for reward in scored)
                add(f"reference: the same play of {title} earns {listed}: the reward depends on something else")
        if played.policy == "reference" and played.scored:
            reward, least = min((min(scored), title) for title, scored in played.by_item.items() if scored)
            if reward < 1:
                add(f"reference: it earns {reward:g} for {least}, less than 1: its answer or the reward is wrong")
            if len(played.rewards) == 1:
                report.notes.append("all items that were played are the same")
        elif played.scored and max(played.scored) > 0:
            count = sum(reward > 0 for reward in played.scored)
            add(
                f"{played.policy}: it earns up to {max(played.scored):g}, in {count} of {len(played.scored)} rollouts: "
                "it can be earned without skill"
            )
    # Without a reference policy, nobody had a chance of more than nothing.
    different = {reward for played in report.played for reward in played.scored}
    if (
        len(different) == 1
        and len(report.played) > 1
        and (different != {0.0} or report.played[0].policy == "reference")
    ):
        add(f"the reward is always {different.pop():g}: nothing can be learned from it")
    looks = {look for played in report.played for look in played.looks}
    if looks:
        report.notes.append(
            f"the reward reads in the agent's own sandbox: {', '.join(sorted(looks)[:3])}. The agent "
            "can write all that is there: read answers there, and run tests by ctx.judge_pytest or in ctx.seal"
        )
