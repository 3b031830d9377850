"""Environments of other frameworks, unmodified: their code runs and scores, the tokens are ours.

    python -m lachesis_compat.guests.verifiers process --env.module my_env
    python -m lachesis_compat.guests.inspect_tasks process --env.task my_task.py@my_task

A guest needs its framework installed in the same environment as Lachesis. `guest` finds the class of a target such as
`verifiers:my_env`.
"""

from lachesis_compat.guests.targets import GUESTS, guest

__all__ = ["GUESTS", "guest"]
