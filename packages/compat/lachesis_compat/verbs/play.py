"""`lachesis play ENV [process|serve|evaluate] ...`: run an environment, also one that was written for Atropos.

Flags are those of `lachesis process` (the default), `serve` and `eval`; `lachesis play ENV process
--help` lists all settings (`--env.NAME VALUE`, `--openai.NAME VALUE`). For environments of Atropos, `--drift` prints
where the tokens that the environment returned differ from the sampled ones; `--json` prints that as JSON lines.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Final

from backends.errors import SettingsError
from lachesis.cli.play_environment import Verb
from lachesis.cli.verb_parser import ENVIRONMENT, NO_ENVIRONMENT, VerbParser

_VERBS: Final[dict[str, Verb]] = {"process": "process", "serve": "serve", "evaluate": "eval", "eval": "eval"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of an environment; the exit code."""
    arguments = list(argv or ())
    if not arguments or arguments[0] in ("-h", "--help"):
        parser = VerbParser(
            prog="lachesis play",
            description=f"{__doc__}\nENV is {ENVIRONMENT}.",
            usage="%(prog)s ENV [process|serve|evaluate] [options]",
        )
        parser.print_help()
        if not arguments:
            print(NO_ENVIRONMENT, file=sys.stderr)
        return 0 if arguments else 2
    target, *rest = arguments
    verb = rest.pop(0) if rest and not rest[0].startswith("-") else "process"
    if verb not in _VERBS:
        raise SettingsError(
            f"lachesis play: there is no {verb!r}; write process, serve, evaluate, or nothing for process"
        )
    drift = "json" if "--json" in rest else "text" if "--drift" in rest else None

    def prepare(env_cls: Any) -> None:
        if drift and not hasattr(env_cls, "drift"):
            raise SettingsError("--drift and --json are for environments of Atropos: leave them out")
        if drift:
            env_cls.drift = drift

    from lachesis.cli import play_environment

    flags = [argument for argument in rest if argument not in ("--drift", "--json")]
    flags = ["--help-all" if argument in ("-h", "--help") else argument for argument in flags]
    return play_environment.main(_VERBS[verb], [target, *flags], prepare=prepare)
