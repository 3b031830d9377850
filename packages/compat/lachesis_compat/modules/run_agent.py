"""The agent under its old name: `from run_agent import AIAgent`."""

from __future__ import annotations

from typing import Any, Final

from backends.plugins import Registry
from lachesis_compat.removed_names import refuse

_AGENTS: Final[Registry[Any]] = Registry("agent", "lachesis.agents", {}, package="lachesis-console")

AIAgent: Any = _AGENTS.load("AIAgent")


def __getattr__(name: str) -> Any:
    refuse("run_agent", name)
