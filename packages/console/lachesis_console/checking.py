"""Mistakes of an environment that show without a model: its reference policy must earn full marks, and policies that do
nothing or call tools at random must earn nothing."""

from __future__ import annotations

import inspect
import io
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from backends.errors import SettingsError
from backends.text import counted
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.runs.command_line import read_settings
from lachesis.runs.failures import RunStopped, UnusableSettings
from lachesis.runs.reference_policy import Policy
from lachesis.runs.results import RunFiles
from lachesis.settings.hooks import misspelt_hooks
from lachesis.settings.server_settings import ServerConfigError
from lachesis.tool_context.own_folder import own_folder
from lachesis.tracebacks import in_one_line
from lachesis_messages.messages import Message, ToolCall
from lachesis_messages.records.jsonl import read_lines

SLOW_SETUP = 30.0
"""Seconds of `setup` that are said to be slow."""
SLOW_SANDBOX = 5.0
"""Seconds of the set-up of one sandbox that are."""
_RANDOM_TURNS = 3
_LOOKS = frozenset({"terminal", "read_file", "read_bytes", "search", "call_tool", "download_file", "download_dir"})
"""Methods of `ctx` that read the agent's files in the agent's sandbox."""


@dataclass(frozen=True, slots=True)
class Played:
    """A policy's rewards."""

    policy: str
    rewards: Mapping[str, Sequence[float | None]]
    """By the title of the item, one for each rollout; None where it has no score."""
    reasons: Mapping[str, int] = field(default_factory=dict)
    """Why rollouts have no score: of how many each reason is; 0 for what stopped the run before one."""
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

    @property
    def tracebacks(self) -> list[str]:
        """Those of the author's code, each once."""
        found = {reason: trace for played in self.played for reason, trace in played.tracebacks.items()}
        return [f"exception in the environment: {reason}\n{trace.rstrip()}" for reason, trace in found.items()]

    def __str__(self) -> str:
        return "\n".join([*self.tracebacks, *self.findings, *self.notes]) or "nothing suspicious"


async def check_environment(
    env_cls: type[HermesAgentBaseEnv], flags: Sequence[str] = (), *, items: int = 5
) -> CheckReport:
    """Play the reference policy twice for each item, and two policies that should earn nothing.

    Args:
        flags: settings as on the command line, such as `["--env.terminal_backend", "docker"]`.
        items: how many items are played.

    Raises:
        SettingsError: settings that cannot be used.
        UnusableSettings: the run cannot continue with them: a judge is missing, or the key of its server is wrong.
        BackendError, InferenceError: the run could not start.
    """
    report = CheckReport(findings=misspelt_hooks(env_cls))
    spent: dict[str, list[float]] = {"setup": [], "setup_sandbox": []}
    policies: list[tuple[str, Policy | None, int]] = [
        ("reference", None, 2),
        ("nothing", lambda messages, tools: Message("assistant", "I do nothing."), 1),
        ("random", random_policy, 1),
    ]
    for name, policy, rollouts in policies:
        overridden: dict[str, Any] = {
            "__module__": env_cls.__module__,
            "__doc__": env_cls.__doc__,
            "name": env_cls.name or env_cls.__name__,
            **{each: _timed(env_cls, each, times) for each, times in spent.items() if _is_own(env_cls, each)},
        }
        if policy is not None:
            overridden["reference_policy"] = lambda self, policy=policy: policy
        cls = type(env_cls.__name__, (env_cls,), overridden)
        try:
            with TemporaryDirectory(prefix="check-", dir=own_folder()) as folder:
                report.played.append(await _play(cls, name, flags, items, rollouts, Path(folder)))
        except NoReferencePolicy:
            report.findings.append("there is no reference_policy(): so nothing shows that full marks are possible")
        if report.played and not report.played[-1].scored:
            break  # no other policy would be scored
    _judge(report)
    for method, times in spent.items():
        limit = SLOW_SETUP if method == "setup" else SLOW_SANDBOX
        if times and (longest := max(times)) > limit:
            report.findings.append(
                f"{method}() took {longest:.1f} s: prepare what it needs once, in an image or a cache"
            )
    return report


class NoReferencePolicy(SettingsError):
    """The environment has none."""


def _is_own(env_cls: type, method: str) -> bool:
    return getattr(env_cls, method) is not getattr(HermesAgentBaseEnv, method)


def _timed(env_cls: type, name: str, times: list[float]) -> Any:
    method = getattr(env_cls, name)
    if inspect.iscoroutinefunction(method):

        async def timed(*arguments: Any) -> Any:
            started = time.monotonic()
            try:
                return await method(*arguments)
            finally:
                times.append(time.monotonic() - started)

        return timed

    def timed_on_thread(*arguments: Any) -> Any:
        started = time.monotonic()
        try:
            return method(*arguments)
        finally:
            times.append(time.monotonic() - started)

    return timed_on_thread


async def _play(
    env_cls: type[HermesAgentBaseEnv], policy: str, flags: Sequence[str], items: int, rollouts: int, folder: Path
) -> Played:
    groups = folder / "groups.jsonl"
    chosen = {
        "openai.model_name": "reference",
        "env.total_steps": items,
        "env.group_size": rollouts,
        "env.data_path_to_save_groups": groups,
        "env.save_trajectories": False,
        "env.use_wandb": False,
    }
    _, settings = read_settings(env_cls, ["process", *flags, *(f"--{name}={value}" for name, value in chosen.items())])
    env = env_cls(**settings)
    env.console = Console(emoji=False, file=io.StringIO())
    stopped: RunStopped | None = None
    try:
        await env.process_manager()
    except UnusableSettings:
        raise  # such as a judge that is not named: nothing was checked
    except RunStopped as error:  # its message says how to start the run again, and its records why it stopped
        stopped = error
    except ServerConfigError:
        if env.reference_policy() is None:
            raise NoReferencePolicy(policy) from None
        raise
    written = [path for path in (groups, RunFiles(groups).failures) if path.is_file()]
    rewards: dict[str, list[float | None]] = {}
    reasons: Counter[str] = Counter()
    tracebacks: dict[str, str] = {}
    looks: dict[str, None] = {}
    for group in (line for path in written for line in read_lines(path)):
        title = json.dumps(group["item"], ensure_ascii=False)[:60]
        for rollout in group["rollouts"]:
            rewards.setdefault(title, []).append(rollout["reward"])
            if rollout["reward"] is None:
                reason = rollout["reason"]
                if trace := rollout["traceback"]:
                    reason = in_one_line(trace)
                    tracebacks.setdefault(reason, trace.partition("\n")[2])
                reasons[reason] += 1
            calls = rollout["reward_calls"] or []
            if not {"judge_pytest", "seal"} & {each["method"] for each in calls}:
                looks.update(dict.fromkeys(_look(each) for each in calls if each["method"] in _LOOKS))
    if stopped is not None and not reasons:
        reasons[str(stopped).partition("\n")[0]] = 0
    return Played(policy, rewards, reasons, tracebacks, list(looks))


def _look(call: Mapping[str, Any]) -> str:
    first = next(iter(call["arguments"] or [""]), "")
    return f"ctx.{call['method']}({str(first)[:40]!r})"


def _judge(report: CheckReport) -> None:
    """Add what the rewards show."""
    add = report.findings.append
    for played in report.played:
        for reason, count in played.reasons.items():
            add(f"{played.policy}: {counted(count, 'rollout')} without a score: {reason}" if count else reason)
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


def random_policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
    """Calls tools with arguments that their schemas allow, a few turns long, then answers anything. Equal conversations
    get equal answers."""
    draw = random.Random(json.dumps(messages, sort_keys=True, default=str))
    turn = sum(message["role"] == "assistant" for message in messages)
    if tools and turn < _RANDOM_TURNS:
        function = draw.choice(tools)["function"]
        arguments = json.dumps(_value(function.get("parameters") or {}, draw))
        return Message("assistant", tool_calls=(ToolCall(f"call_{turn}", function["name"], arguments),))
    return Message("assistant", draw.choice(["The answer is 7.", "\\boxed{7}", "Done.", "yes", "I do not know."]))


def _value(schema: Mapping[str, Any], draw: random.Random) -> Any:
    """A value that a JSON schema allows, as far as tools have such."""
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf"):
        return _value(draw.choice(options), draw)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    least = schema.get("minimum", 0)
    if kind == "object":
        needed = schema.get("required", ())
        properties: Mapping[str, Any] = schema.get("properties", {})
        return {name: _value(each, draw) for name, each in properties.items() if name in needed or draw.random() < 0.3}
    if kind == "array":
        return [_value(schema.get("items", {}), draw) for _ in range(draw.randint(0, 2))]
    values: dict[str, Callable[[], Any]] = {
        "integer": lambda: draw.randint(int(least), int(least) + 5),
        "number": lambda: least + draw.random(),
        "boolean": lambda: draw.random() < 0.5,
        "null": lambda: None,
    }
    return values.get(kind, lambda: draw.choice(["a.txt", "ls", "1 + 1", ".", "hello"]))()
