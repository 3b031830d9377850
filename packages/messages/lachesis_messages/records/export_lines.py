"""The lines that an export yields, and the conversations of group records as lines of trajectory files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from lachesis_messages.errors import MessageError
from lachesis_messages.records.entries import ConvertedEntry, to_trajectory_entry
from lachesis_messages.records.groups import (
    GroupRecord,
    RolloutRecord,
    has_other_branches,
    is_complete,
    not_sampled,
    stored_messages,
)
from lachesis_messages.records.sharegpt import PARTS_OMITTED, SystemTurn

BRANCHES_OMITTED = "branches_omitted"
"""The model sampled answers that are not in the line: those before a compaction or an edit."""


NOT_SAMPLED = "answers_not_sampled"
"""The line has answers that the model did not sample there, and a trainer of the format cannot tell."""


@dataclass(frozen=True, slots=True)
class ExportLine:
    """One line of the output."""

    content: Mapping[str, Any]
    """A JSON object."""
    rollout_ids: tuple[str, ...]
    """The rollouts whose data it holds."""
    warnings: tuple[str, ...] = ()
    """Kinds of changes that the format forced on the data. The totals count them."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, dict | Mapping):
            raise TypeError(f"ExportLine: content is a JSON object, not {_shown(self.content)}")
        for name in ("rollout_ids", "warnings"):
            if not _is_texts(given := getattr(self, name)):
                hint = f"; write ({given!r},)" if isinstance(given, str) else ""
                raise TypeError(f"ExportLine: {name} is a tuple of texts, not {_shown(given)}{hint}")


@dataclass(frozen=True, slots=True)
class LeftOutRollout:
    """A rollout that is in no line."""

    rollout_id: str
    reason: str
    """A few words that many rollouts share: the totals count by reason."""

    def __post_init__(self) -> None:
        if not _is_texts((self.rollout_id, self.reason)):
            raise TypeError(
                f"LeftOutRollout: takes a rollout_id and a reason, not {_shown((self.rollout_id, self.reason))}"
            )


NO_ANSWER = "no answer by the model"


_FACTS = ("run", "evaluation", "environment", "item_key", "model", "timestamp")


class Unsuitable(ValueError):
    """A format cannot hold a conversation. The message is the reason, in words that many conversations share."""


@dataclass(slots=True)
class Chat:
    """A conversation, of a rollout or of an entry of a file."""

    messages: Sequence[Mapping[str, Any]]
    """OpenAI messages, with reasoning under `reasoning`."""
    tools: Sequence[Mapping[str, Any]]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else is known: `model`, `completed`, `rollout_id`, ..."""
    not_sampled: frozenset[int] = frozenset()
    """Indices of assistant messages that the model did not sample there."""
    of_program: bool = False
    """Then system messages may be anywhere."""
    branches_omitted: bool = False
    """Whether answers that the model sampled are missing: those before a compaction or an edit."""
    last_attempt: Sequence[Mapping[str, Any]] = ()
    """Of a rollout without an answer: what was taken back last, as completions that could not be used."""
    warnings: set[str] = field(default_factory=set)
    """Kinds of changes that a format forced on it."""
    parts_omitted: int = 0
    """Of an entry that has lost images and other parts that are no text: how many."""


def chat_of(group: GroupRecord, rollout: RolloutRecord) -> Chat:
    """The conversation of a rollout."""
    messages = stored_messages(group, rollout)
    facts = {name: group[name] for name in _FACTS if name in group}
    facts |= {"rollout_id": rollout["rollout_id"], "outcome": rollout["outcome"]}
    facts |= {"completed": is_complete(rollout, messages), "reward": rollout["reward"]}
    unsampled, omitted = not_sampled(rollout, messages), has_other_branches(rollout)
    last: Sequence[Mapping[str, Any]] = ()
    if not any(each["role"] == "assistant" for each in messages):
        for dropped in rollout.get("discarded") or ():
            if dropped["at"] == len(messages) and not dropped.get("edit"):
                last = dropped["messages"]
    return Chat(messages, group["tools"], facts, unsampled, "program" in rollout, omitted, last)


def of_rollouts(line: Callable[..., dict[str, Any]]) -> Callable[..., Iterator[ExportLine | LeftOutRollout]]:
    """The export that writes a `line` of the conversation of each rollout, with the same options."""

    @wraps(line)
    def export(group: GroupRecord, **options: Any) -> Iterator[ExportLine | LeftOutRollout]:
        for rollout in group["rollouts"]:
            chat = chat_of(group, rollout)
            try:
                content = line(chat, **options)
            except (Unsuitable, MessageError) as error:
                yield LeftOutRollout(rollout["rollout_id"], reason_of(error))
            else:
                yield ExportLine(content, (rollout["rollout_id"],), tuple(sorted(chat.warnings)))

    return export


def reason_of(error: Unsuitable | MessageError) -> str:
    """Why a conversation is left out, in words that many share."""
    return str(error) if isinstance(error, Unsuitable) else f"no valid conversation ({type(error).__name__})"


def check_wanted(chat: Chat, min_reward: float | None, completed_only: bool) -> None:
    """Raises Unsuitable for a conversation that is not wanted."""
    if completed_only and not chat.facts.get("completed", True):
        raise Unsuitable("not completed")
    reward = chat.facts.get("reward")
    if min_reward is not None and (reward is None or reward < min_reward):
        raise Unsuitable(f"reward below {min_reward:g}")


def trajectory_line(
    chat: Chat, *, system: SystemTurn = "generated", model: str = "unknown", timestamp: str = ""
) -> dict[str, Any]:
    """A conversation with an answer, as `process` writes it. `model` and `timestamp` are for one that does not know.

    Where no answer could be used, it ends with the last one.
    """
    facts = dict(chat.facts)
    return _written(
        chat,
        to_trajectory_entry(
            [*chat.messages, *chat.last_attempt] if chat.last_attempt else _answered(chat),
            chat.tools,
            model=str(facts.pop("model", None) or model),
            completed=facts.pop("completed", True) is not False,
            timestamp=facts.pop("timestamp", None) or timestamp or None,
            system=system,
            of_program=chat.of_program,
            **facts,
        ),
    )


trajectory = of_rollouts(trajectory_line)


def _answered(chat: Chat) -> Sequence[Any]:
    """Its messages. Raises Unsuitable where the model said nothing."""
    if not any(message["role"] == "assistant" for message in chat.messages):
        raise Unsuitable(NO_ANSWER)
    return chat.messages


def _written(chat: Chat, converted: ConvertedEntry) -> dict[str, Any]:
    chat.warnings.update(str(warning.kind) for warning in converted.warnings)
    chat.warnings.update([NOT_SAMPLED] if chat.not_sampled else [], [BRANCHES_OMITTED] if chat.branches_omitted else [])
    omitted = {PARTS_OMITTED: chat.parts_omitted} if chat.parts_omitted else {}
    return {**converted.entry, **omitted}


def _is_texts(given: Any) -> bool:
    return isinstance(given, tuple | list | set | frozenset) and all(isinstance(text, str) for text in given)


def _shown(value: Any) -> str:
    text = repr(value)
    return "None" if value is None else f"a {type(value).__name__}: {text if len(text) <= 80 else text[:77] + '...'}"


@dataclass(slots=True)
class ExportTotals:
    """Counts over a whole export."""

    groups: int = 0
    rollouts: int = 0
    lines: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Reason -> rollouts that are in no line."""
    warnings: Counter[str] = field(default_factory=Counter)
    """Kind -> lines."""
