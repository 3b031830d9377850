"""The executor's filter of system calls as a seccomp profile of Docker, for engines that give containers none.

The executor filters what it starts in any case. This also holds for what the engine starts (`exec`). An engine's own
profile is stricter than this one and is left in place.
"""

from __future__ import annotations

import errno
import json
from typing import Any

from backends.executor import system_calls
from backends.executor.kernel import MACHINES


def profile(machine: str) -> str:
    """The profile as JSON; `machine` as in `uname -m`."""
    column = MACHINES[machine][1]
    rules: list[dict[str, Any]] = []

    def refuse(error: int, *names: str, **argument: Any) -> None:
        arguments = [argument] if argument else []
        rules.append({"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error, "args": arguments})

    for error, text in system_calls.REFUSED.items():
        refuse(error, *system_calls.call_numbers(text, column))
    flags = system_calls.NAMESPACES
    for flag in (1 << bit for bit in range(32) if flags >> bit & 1):
        refuse(errno.EPERM, "clone", "unshare", index=0, value=flag, valueTwo=flag, op="SCMP_CMP_MASKED_EQ")
    allowed = (*system_calls.FAMILIES, system_calls.NETLINK)
    for family in range(max(allowed)):
        if family not in allowed:
            refuse(errno.EAFNOSUPPORT, "socket", index=0, value=family, op="SCMP_CMP_EQ")
    refuse(errno.EAFNOSUPPORT, "socket", index=0, value=max(allowed), op="SCMP_CMP_GT")
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules})
