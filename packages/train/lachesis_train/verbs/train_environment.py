"""The environment of `lachesis train`, in its own process.

python -m lachesis_train.verbs.train_environment ENVIRONMENT serve [--config FILE] [--env.NAME VALUE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from lachesis.cli.environment_classes import environment_class
from lachesis.runs import command_line


def main(argv: Sequence[str] | None = None, *, run: Callable[[Any], Awaitable[Any]] | None = None) -> int:
    """Run one command of an environment, or `run` in its place; the exit code."""
    target, *rest = sys.argv[1:] if argv is None else argv
    if "" not in sys.path:
        sys.path.append("")
    try:
        env_cls = environment_class(target)
    except Exception as error:
        return command_line.report_error(error)
    return command_line.main(env_cls, rest, run=run)


if __name__ == "__main__":
    sys.exit(main())
