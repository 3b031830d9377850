"""The rollout API's status: a page for people, and metrics in Prometheus' text format."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import jinja2

from lachesis_train.api.state import ApiState, Group


@dataclass(frozen=True, slots=True)
class ApiFigures:
    """The API at one moment. Times are in seconds, sizes in bytes."""

    version: str
    state: ApiState
    counts: Mapping[str, int]
    """Since the start of the process: received, duplicate, refused, full, batches, tokens."""
    most_stored: int
    reading: int
    trainers: Mapping[str, float]
    """Time since each trainer was heard."""
    environments: Mapping[int, float]
    """Time since each environment was heard."""

    @property
    def oldest(self) -> float:
        """The time that the oldest group waits."""
        first = next(iter(self.state.waiting.values()), None)
        return 0.0 if first is None else max(0.0, time.time() - first.received)

    @property
    def silent(self) -> float | None:
        """Time since any trainer was heard."""
        return min(self.trainers.values(), default=None)

    def condition(self, group: Group) -> str:
        """Where a group is."""
        held = self.state.held
        if group.id not in held:
            return "acknowledged"
        return "waiting" if held[group.id] is None else f"in batch {held[group.id]}"


def page(figures: ApiFigures) -> str:
    """HTML that needs nothing else."""
    return _template().render(f=figures, state=figures.state, ages=sorted(figures.state.ages), now=time.time())


@cache
def _template() -> jinja2.Template:
    text = resources.files("lachesis_train.api").joinpath("templates/page.html").read_text(encoding="utf-8")
    return jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def metrics(figures: ApiFigures) -> str:
    """The lines of `/metrics`."""
    return "".join(f"{line}\n" for line in _metrics(figures))


def _metrics(figures: ApiFigures) -> Iterator[str]:
    state, ages, silent = figures.state, figures.state.ages, figures.silent
    counters = {
        "received": ("groups_received_total", "groups taken, without copies"),
        "duplicate": ("groups_duplicate_total", "copies of groups that were taken before"),
        "refused": ("requests_refused_total", "requests with a group or a value that is not valid (422)"),
        "full": ("requests_full_total", "groups that there was no room for (429)"),
        "tokens": ("tokens_received_total", "tokens of the groups taken"),
        "batches": ("batches_formed_total", "batches formed"),
    }
    for key, (name, text) in counters.items():
        yield from _metric(name, "counter", text, figures.counts.get(key, 0))
    gauges = {
        "groups_waiting": ("groups in the queue", len(state.waiting)),
        "sequences_waiting": ("sequences in the queue", state.waiting_sequences),
        "oldest_waiting_seconds": ("time that the oldest group waits", figures.oldest),
        "batches_unacknowledged": ("batches that the trainer has not acknowledged", len(state.batches)),
        "stored_bytes": ("groups in the queue and in unacknowledged batches", state.stored),
        "stored_bytes_limit": ("of stored_bytes", figures.most_stored),
        "reading_bytes": ("bodies of requests in memory", figures.reading),
        "trainer_step": ("batches formed, from the trainer's first step", state.step),
        "environments_connected": ("environments", sum(env.connected for env in state.environments)),
    }
    for name, (text, value) in gauges.items():
        yield from _metric(name, "gauge", text, value)
    if silent is not None:
        yield from _metric("trainer_silent_seconds", "gauge", "time since a trainer was heard", silent)
    if ages:
        yield from _metric("age_mean_batches", "gauge", "age of the last 1000 trained groups", sum(ages) / len(ages))
        yield from _metric("age_max_batches", "gauge", "the greatest of these ages", max(ages))


def _metric(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    name = f"lachesis_api_{name}"
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
    yield f"{name} {value:.17g}"
