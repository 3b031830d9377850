"""Two sandboxes of one backend: one sends, the other must not notice."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from backends import Sandbox

from .attack import AttackTarget, Family, Fell, Held, Verdict, program, python, run_inside, verdict
from .inside import neighbours
from .probes import output

neighbour_signals = Family("neighbours")

NAMES = [name[5:] for name in vars(neighbours) if name.startswith("send_")]


def _signal(name: str) -> Any:
    async def run(target: AttackTarget) -> Verdict:
        number = random.randrange(1, 1 << 30)
        other = await target.neighbour()
        before = await _seen(other, name, number)
        if before[0] != "held":
            return verdict(*before)
        sending = asyncio.create_task(_send(target.sandbox, name, number))
        try:
            await output(target.sandbox, f"until test -e sent-{number}; do sleep 0.02; done; rm sent-{number}")
            return verdict(*await _seen(other, name, number))
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    return run


async def _send(sandbox: Sandbox, name: str, number: int) -> None:
    sent = f"open('sent-{number}', 'w').close()"
    send = f"try:\n    send_{name}()\nexcept OSError:\n    pass\n"  # refused to the sender: nothing to see then
    code = f"MARK = {number}\n{send}{sent}\ntime.sleep(8)\n"
    if name in ("opening", "shared_memory"):  # these keep it up themselves
        code = f"MARK = {number}\n{sent}\n{send}"
    await sandbox.exec(python(sandbox), stdin=program(neighbours, code).encode(), timeout=30)


async def _seen(sandbox: Sandbox, name: str, number: int) -> list[str]:
    ran = await run_inside(sandbox, neighbours, f"MARK = {number}\nmain({{'see': see_{name}}}, ['see'])")
    if ran.exit_code:
        raise RuntimeError(f"the attack could not run inside: {ran}")
    seen: list[str] = json.loads(ran.stdout)["see"]
    return seen


for _name in NAMES:
    _tries = (getattr(neighbours, f"send_{_name}").__doc__ or "").partition("\n")[0]
    neighbour_signals.attack(_name.replace("_", " "), _tries)(_signal(_name))


@neighbour_signals.attack("files", "see files, variables and processes of another sandbox")
async def files(target: AttackTarget) -> Verdict:
    name = f"attack-{random.randrange(1 << 60)}"
    await target.sandbox.exec(f"for d in . ~ /tmp /var/tmp /dev/shm; do : > $d/{name}; done 2> /dev/null", timeout=30)
    process = await target.sandbox.start(f"exec -a {name} sleep 100")
    hidden = f"{name[:-1]}[{name[-1]}]"
    find = (
        f"find / -xdev -name '{hidden}' -not -path '/proc/*' 2> /dev/null; find /tmp /dev ~ . -name '{hidden}';"
        f"cat /proc/[0-9]*/cmdline | tr '\\0' '\\n' | grep '^{hidden}'"
    )
    own = b""
    for _ in range(100):  # until the process has its name
        own = (await target.sandbox.exec(find, timeout=60)).stdout
        if own.count(name.encode()) > own.count(b"/" + name.encode()):
            break
        await asyncio.sleep(0.05)
    else:
        raise RuntimeError(f"the search does not find what is there: {own!r}")
    found = (await (await target.neighbour()).exec(find, timeout=60)).stdout
    await process.kill()
    return Fell(f"seen: {found.decode().split()[:5]}") if name.encode() in found else Held()
