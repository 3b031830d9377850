"""The environment of `lachesis train`, in a process of its own.

    python -m lachesis.cli.train_environment ENVIRONMENT serve [--config FILE] [--env.NAME VALUE ...]

The environment is a name of `ENVIRONMENTS`, `path.py:Class` or `package.module:Class`; it may be one of Atropos.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any, Final

from lachesis.cli.play import load_env
from lachesis.errors import SettingsError
from lachesis.runs import command_line
from lachesis.runs.flags import close_names

ENVIRONMENTS: Final = {
    "gsm8k": "lachesis.environments.gsm8k:GSM8kAgentEnv",
    "terminal": "lachesis.environments.terminal_test:TerminalTestEnv",
    "tool_call": "lachesis.environments.tool_call:ToolCallEnv",
    "tool_result": "lachesis.environments.tool_call:ToolResultEnv",
}


def environment_class(target: str) -> Any:
    """The class of an environment; one of Atropos is wrapped.

    Raises:
        SettingsError: there is no such environment.
    """
    if target in ENVIRONMENTS:  # without Atropos, which takes 5 seconds to import where torch is installed
        module, _, name = ENVIRONMENTS[target].partition(":")
        return getattr(importlib.import_module(module), name)
    if ":" not in target and not target.endswith(".py"):
        near = close_names(target, ENVIRONMENTS)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(ENVIRONMENTS)}"
        raise SettingsError(f"there is no environment {target!r}; {hint} (or write path.py:Class)")
    from lachesis.base_env import HermesAgentBaseEnv
    from lachesis.environments.atropos_player import player_for, prepare_imports

    prepare_imports()
    found = load_env(target)
    return found if issubclass(found, HermesAgentBaseEnv) else player_for(found)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of an environment; the exit code."""
    target, *rest = sys.argv[1:] if argv is None else argv
    if "" not in sys.path:
        sys.path.append("")
    try:
        env_cls = environment_class(target)
    except Exception as error:
        return command_line.report_error(error)
    return command_line.main(env_cls, rest)


if __name__ == "__main__":
    sys.exit(main())
