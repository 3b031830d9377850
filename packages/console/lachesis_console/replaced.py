"""Two things that audits, chats and checks share: an environment with other methods, and texts without what varies."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lachesis.base_env import HermesAgentBaseEnv

_VOLATILE = re.compile(r"/tmp/\S+|0x[0-9a-f]+|[0-9a-f]{8,}|\d+([.:]\d+)*")


def with_methods(env_cls: type[HermesAgentBaseEnv], **methods: Any) -> type[HermesAgentBaseEnv]:
    """A subclass of the same name with other methods."""
    name = env_cls.name or env_cls.__name__
    own = {"__module__": env_cls.__module__, "__doc__": env_cls.__doc__, "name": name}
    return type(env_cls.__name__, (env_cls,), {**own, **methods})


def without_volatile(text: str) -> str:
    """`text` without what may differ between two runs of one program: times, addresses, numbers, names of folders."""
    return _VOLATILE.sub("#", text)
