"""Rollouts of earlier runs: found in their files, replayed as a policy, and compared with what happens now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.errors import SettingsError, cannot_read
from lachesis.runs.reference_policy import Policy
from lachesis_console.chat.ran import Lost, RolloutRan
from lachesis_console.replaced import with_methods, without_volatile
from lachesis_messages.messages import Message
from lachesis_messages.records.groups import stored_messages
from lachesis_messages.records.jsonl import read_lines

if TYPE_CHECKING:
    from lachesis.base_env import HermesAgentBaseEnv


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout in a groups file."""

    environment: str
    item: Any
    rollout_id: str
    reward: float | None
    prompt: Sequence[Mapping[str, Any]]
    """Messages before the first of the assistant, as OpenAI's dicts."""
    turns: Sequence[Mapping[str, Any]]
    """All others."""
    lost: Lost = field(default_factory=dict)
    """What ran and is not in the conversation, by the place in `turns`."""
    new_prompt: Sequence[Mapping[str, Any]] | None = None
    """The prompt, where a summary has replaced a part of that of the item."""
    why_not: str = ""
    """Why it cannot be played again; empty where it can."""

    @property
    def played(self) -> Iterator[Mapping[str, Any]]:
        """The turns of the assistant as they were played, with those that are not in the conversation."""
        for place in range(len(self.turns) + 1):
            yield from (each for each in self.lost.get(place, ()) if each["role"] == "assistant")
            yield from (each for each in self.turns[place : place + 1] if each["role"] == "assistant")


def recorded_rollouts(path: Path) -> Iterator[RecordedRollout]:
    """The rollouts of a groups file, or of all such files in a folder.

    Raises:
        SettingsError: there are none.
    """
    files = sorted(filter(Path.is_file, path.glob("*.jsonl"))) if path.is_dir() else [path]
    if not any(file.exists() for file in files):
        wrong = f"{path} has no *.jsonl file" if path.is_dir() else cannot_read(path)
        raise SettingsError(f"{wrong}; name a run's folder, or its groups.jsonl or samples.jsonl")
    for file in files:
        for record in read_lines(file, torn_tail=True):
            if not isinstance(record, Mapping) or not str(record.get("schema", "")).startswith("lachesis.group/"):
                continue
            for about in record["rollouts"]:
                messages = stored_messages(record, about)
                first = next((at for at, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
                prompt, turns = messages[:first], messages[first:]
                place = record["environment"], record["item"], about["rollout_id"], about["reward"]
                ran = RolloutRan(record, about)
                try:
                    lost = ran.lost()
                except SettingsError as error:
                    yield RecordedRollout(*place, prompt, turns, why_not=str(error))
                    continue
                lost = {max(0, at - first): messages for at, messages in lost.items()}
                new = prompt if ran.changed_the_prompt else None
                yield RecordedRollout(*place, prompt, turns, lost, new)


def find_rollout(name: str) -> RecordedRollout:
    """The rollout of `PATH`, or of `PATH#ID` with the beginning of its id.

    Raises:
        SettingsError: there is none, or several begin so.
    """
    path, _, rollout_id = name.partition("#")
    found = [each for each in recorded_rollouts(Path(path)) if each.rollout_id.startswith(rollout_id)]
    if not found:
        raise SettingsError(f"{path} has no rollout {rollout_id or 'at all'}; `lachesis view {path}` shows their ids")
    if rollout_id and len(found) > 1:
        raise SettingsError(f"{path}: {len(found)} rollouts begin with {rollout_id}; give more of the id")
    if found[0].why_not:
        raise SettingsError(found[0].why_not)
    return found[0]


def installed(environment: str) -> str | None:
    """The name by which `lachesis envs` lists the environment of a recording; None where it does not."""
    from lachesis.cli.environment_classes import ENVIRONMENTS

    for name in ENVIRONMENTS.names():
        env_cls: Any = ENVIRONMENTS.load(name)
        if environment in (name, env_cls.name or env_cls.__name__):
            return name
    return None


def recorded_policy(*paths: str | Path) -> Policy:
    """A policy that says what the rollouts of these files said, for `reference_policy()`: a person's recording is then
    the solution that `lachesis check` plays. Of several rollouts of one item, it takes the one with the best reward.

    Raises:
        SettingsError: no rollout is recorded there; and by the policy, if none began with these messages.
    """
    best: dict[str, RecordedRollout] = {}
    for path in paths:
        for each in recorded_rollouts(Path(path)):
            if each.why_not:
                continue
            known = best.get(key := _key(each.prompt))
            if known is None or (each.reward or 0.0) > (known.reward or 0.0):
                best[key] = each

    if not best:
        raise SettingsError(f"{', '.join(map(str, paths))}: no finished rollout is recorded there")

    def policy(messages: Sequence[Mapping[str, Any]], tools: Any) -> Message:
        first = next((at for at, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        found = best.get(_key(messages[:first]))
        if found is None:
            raise SettingsError("no recorded rollout begins with these messages")
        said = [*found.played]
        turn = sum(message["role"] == "assistant" for message in messages)
        return Message.from_openai(said[turn]) if turn < len(said) else Message("assistant", "")

    return policy


def with_recordings(env_cls: type[HermesAgentBaseEnv], path: str) -> type[HermesAgentBaseEnv]:
    """The environment, whose reference policy is what was recorded there."""
    policy = recorded_policy(path)
    return with_methods(env_cls, reference_policy=lambda env: policy)


def _key(prompt: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([[each["role"], each.get("content")] for each in prompt], sort_keys=True)


def differs(recorded: str, now: str) -> str:
    """How two results of one call differ: nothing, `volatile` parts only (times, addresses, numbers), or `other`."""
    if recorded == now:
        return ""
    return "volatile" if without_volatile(recorded) == without_volatile(now) else "other"
