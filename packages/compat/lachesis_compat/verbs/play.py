"""`lachesis play`: an environment written for Atropos' BaseEnv, unmodified, with exact tokens.

    lachesis play PATH/TO/env.py:Class serve|process|evaluate [--env.NAME VALUE ...] [--openai.NAME VALUE ...]

`package.module:Class` works as well, and `:Class` may be left out where the file defines one environment.
Environments of other frameworks are `verifiers:MODULE[?args]` or `inspect:FILE.py@TASK[?args]`.
`--drift` prints where the tokens that the environment returned differ from the sampled ones; `--json` prints that as
JSON lines.
"""

from __future__ import annotations

from collections.abc import Sequence

from backends.errors import SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of an environment of Atropos or of a guest; the exit code."""
    arguments = list(argv or ())
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    target, *rest = arguments
    drift = "json" if "--json" in rest else "text" if "--drift" in rest else None
    from lachesis.cli.environment_classes import environment_class
    from lachesis.runs import command_line

    env_cls = environment_class(target)
    if drift is not None:
        from lachesis_compat.atropos.player import AtroposPlayer

        if not issubclass(env_cls, AtroposPlayer):
            raise SettingsError("--drift and --json are for environments of Atropos: leave them out")
        env_cls.drift = drift
    rest = [argument for argument in rest if argument not in ("--drift", "--json")]
    return command_line.main(env_cls, rest, prog=" ".join(["lachesis play", target, *rest[:1]]))
