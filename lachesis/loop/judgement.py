"""The result of `ToolContext.judge_pytest`."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class TestVerdict:
    """The result of one test."""

    __test__ = False

    outcome: str
    """As it is: `passed`, `failed`, `error`, `skipped`, `xfailed`, `missing` (no report), `contradictory` (several)."""
    changed: str
    """The same test changed so that a right solution fails it."""
    kind: str
    """How it was changed: `value`, `inverted` or `ended`, see `lachesis_envs.judging.changed_tests`."""
    change: str = ""
    """The changed text, for people."""

    @property
    def passed(self) -> bool:
        """It passed as it is, and failed when changed."""
        return self.outcome == "passed" and self.changed in ("failed", "error")

    @property
    def forged(self) -> bool:
        """It passed as it is and also when changed, which no solution does; or there were several reports.

        A wrong solution may pass a changed test alone, by accident.
        """
        return self.outcome == self.changed == "passed" or "contradictory" in (self.outcome, self.changed)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of `judge_pytest`."""

    tests: Mapping[str, TestVerdict]
    """By id, all those that were expected and no others."""
    output: str
    """What pytest printed in the last run."""
    missing: tuple[str, ...] = ()
    """Sources that the agent left nothing at."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Sources that were not taken along, with the reason."""

    @property
    def forged(self) -> str:
        """Why the outcomes cannot be believed; empty where they can."""
        found = [id for id, verdict in self.tests.items() if verdict.forged]
        if not found:
            return ""
        return f"{len(found)} of {len(self.tests)} tests passed, and also when changed to fail: {', '.join(found)}"

    @property
    def passed(self) -> bool:
        """Every expected test passed, and nothing is forged."""
        return self.fraction == 1.0

    @property
    def fraction(self) -> float:
        """The part of the expected tests that passed; 0 where something is forged."""
        return 0.0 if self.forged else sum(verdict.passed for verdict in self.tests.values()) / len(self.tests)

    def __await__(self) -> Generator[Any, Any, Judgement]:
        yield from ()
        return self
