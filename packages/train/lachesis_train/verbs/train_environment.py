"""The environment of `lachesis train`, in its own process.

python -m lachesis_train.verbs.train_environment ENVIRONMENT serve [--config FILE] [--env.NAME VALUE ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lachesis.cli.environment_classes import environment_class
from lachesis.runs import command_line


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
