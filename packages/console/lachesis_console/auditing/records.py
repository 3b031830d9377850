"""What the audit keeps of a rollout and of an environment, as plain data: the process that plays writes it, another one
judges it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LONGEST = 4000
"""Characters that are kept of a text: its first half and its last."""


@dataclass(slots=True)
class AuditPlay:
    """One rollout of one item by one policy."""

    item: int
    """Its place among the items that are played."""
    policy: str
    block: str
    """Where in the audit: "first", "again" (directly after), "later" (after all others), "fresh" (the first ones of a
    second start, as in the first one), "reversed", "interleaved"."""
    reward: float | None = None
    outcome: str = ""
    kind: str = ""
    """Of why there is no reward: `Rollout.unscored_kind`."""
    reason: str = ""
    traceback: str = ""
    fault: str = ""
    """An exception in the reward that the agent's play caused, and which became its score."""
    prompt: str = ""
    told: str = ""
    """The system prompt, and the definitions of the environment's own tools."""
    changed: bool = False
    """The item is another one after it was played."""
    prompt_length: int = 0
    """Characters, with the definitions of the tools."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """What the policy said: `text` and `calls`, each with `name` and `arguments`."""
    seen: list[str] = field(default_factory=list)
    """What it read after the prompt."""
    tool_errors: list[tuple[str, str, str]] = field(default_factory=list)
    """Tool, arguments, error."""
    metrics: dict[str, float] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    """What the reward's commands printed."""
    looks: list[str] = field(default_factory=list)
    """What the reward read in the agent's own sandbox."""
    seconds: float = 0.0
    memory: float = 0.0
    """MiB of all processes of the environment when it ended, at most."""
    held: int = 0
    """Open files, threads and child processes of the environment's process when it ended."""
    drew: str = ""
    """Digest of the state of Python's global random numbers when it ended; empty if it drew none."""
    began: float = 0.0
    """Seconds since 1970."""

    @property
    def called(self) -> list[str]:
        return [call["name"] for turn in self.turns for call in turn["calls"]]

    @property
    def words(self) -> str:
        """All that the environment itself tells the agent before the first turn."""
        return f"{self.told} {self.prompt}"

    @property
    def signature(self) -> tuple[Any, ...]:
        return (self.reward, self.kind, self.prompt, *self.seen)

    def to_record(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class EnvironmentFacts:
    """What is known of the environment, apart from rollouts."""

    name: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    digests: list[str] = field(default_factory=list)
    """Of the items that are played, in order."""
    items: list[str] = field(default_factory=list)
    """Their text."""
    answers: list[str] = field(default_factory=list)
    """What an item's own field says is its answer; empty where there is no such field."""
    secrets: list[list[str]] = field(default_factory=list)
    """Values of each that its prompt does not show."""
    tools: list[list[dict[str, Any]]] = field(default_factory=list)
    """Definitions of the tools of each."""
    scanned: list[tuple[str, str, str]] = field(default_factory=list)
    """Of the items that are played, and of further ones: digest, digest of the content without numbers of items and
    names of splits, and the prompt; it is empty where only a session knows it."""
    evaluation: list[tuple[str, str, str]] = field(default_factory=list)
    """The same of the items of evaluations, where the environment has its own."""

    not_offered: list[str] = field(default_factory=list)
    """Items whose answer is not among their choices."""
    cut: list[str] = field(default_factory=list)
    """Items whose prompt shows the beginning of a text only."""
    has_reference: bool | None = None
    has_turns: bool = False
    """Whether the environment answers: by tools, or as a user."""
    prepares: bool = False
    """Whether it prepares the sandbox of each rollout: items of one prompt may differ in what is there."""
    has_shell: bool = False
    """Whether the agent has Lachesis' own `terminal`. A tool of the environment that takes commands may run them
    anywhere."""
    has_walls: bool = True
    setup: dict[str, float] = field(default_factory=dict)
    """The longest seconds of `setup` and `setup_sandbox`."""
    reward_range: tuple[float, float] | None = None
    misspelt: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """What was not played, and why."""
    started: float = 0.0
    """When the environment was ready, in seconds since 1970."""
    memory: float = 0.0
    """MiB of all processes when it was ready."""


def asked_for(look: str, words: str) -> bool:
    """Whether the words name the file of a look into the agent's sandbox: it has to be read where the agent leaves
    it."""
    call, path, *_ = look.split("'")
    return "terminal" not in call and re.search(rf"(?<![\w/.-]){re.escape(path)}(?![\w/-])", words) is not None


def shortened(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest // 2]} … {text[-longest // 2 :]}"


def shown(play: AuditPlay, text: str = "") -> dict[str, Any]:
    said = text or (play.turns[-1]["text"] if play.turns else "")
    return {"item": play.item, "policy": play.policy, "reward": play.reward, "text": shortened(said, 300)}


def map_shown(plays: Iterable[AuditPlay]) -> list[dict[str, Any]]:
    return [shown(play) for play in plays]


_TEXTS = re.compile(
    r"question|prompt|problem|text|task|instruction|context|descri|document|passage|story|article|dialog", re.IGNORECASE
)
_BEGINNING = 40
"""Characters of a text by which it is known in a prompt."""


def cut_field(item: Mapping[str, Any], prompt: str) -> str:
    """The field of an item whose text ends early in its prompt; empty where none does."""
    shown = " ".join(prompt.split())
    for name, value in item.items():
        text = " ".join(value.split()) if isinstance(value, str) and _TEXTS.search(str(name)) else ""
        if len(text) <= _BEGINNING or text in shown or (at := shown.find(text[:_BEGINNING])) < 0:
            continue
        rest = zip(text, shown[at:], strict=False)
        equal = next((n for n, (a, b) in enumerate(rest) if a != b), len(shown) - at)
        if re.match(r"$|\s|\.\.\.|…|\[", shown[at + equal :]):
            return f"{name} has {len(text)} characters, the prompt shows {equal}"
    return ""


def answer_field(item: Any) -> str:
    """The answer in an item's own field, or in that of the row inside it."""
    if not isinstance(item, Mapping):
        return ""
    for name in ("answer", "solution", "ground_truth", "expected", "target", "label", "gold", "reference"):
        value = item.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    nested: Sequence[Any] = [value for value in item.values() if isinstance(value, Mapping)]
    return next(filter(None, map(answer_field, nested)), "")


_CHOICES = re.compile(r"choices|options|candidates|alternatives", re.IGNORECASE)


def not_offered(item: Mapping[str, Any]) -> str:
    """The answer of an item that is not among its choices; empty where it is, or where there are none."""
    lists = [value for key, value in item.items() if _CHOICES.fullmatch(str(key)) and isinstance(value, list | Mapping)]
    answer = answer_field(item)
    if not answer or len(lists) != 1 or not lists[0]:
        return ""
    values = [*lists[0].values(), *lists[0]] if isinstance(lists[0], Mapping) else lists[0]
    letters = [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"[: len(lists[0])], *map(str, range(len(lists[0]) + 1))]
    known = {str(value).strip().casefold() for value in (*values, *letters)}
    return "" if answer.strip("().").casefold() in known or answer.casefold() in known else answer
