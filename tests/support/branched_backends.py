"""Backends whose sandboxes have had a life before: children of a used parent, and such that were used and reset."""

from __future__ import annotations

import asyncio

from backends import SandboxSpec
from backends.host.sandbox import HostSandbox
from backends.local import LocalBackend

USED = """
    for folder in /workspace /tmp /dev/shm /home/agent /usr/local/bin; do echo used > $folder/used; done
    ipcmk -M 1000 > /dev/null; cd /tmp; export USED=1; rm -rf /usr/share/doc; sleep 1000 &
"""


class ForkedBackend(LocalBackend):
    """Each sandbox is the child of a child of one that is gone."""

    async def create(self, spec: SandboxSpec) -> HostSandbox:
        made = [await super().create(spec)]
        try:
            for _ in range(2):
                made.append(await made[-1].fork(labels=spec.labels))
                other = "echo other > /workspace/other; echo other > /dev/shm/other"
                await made[-2].exec(other, timeout=60, fresh=True)
            for sandbox in made[:-1]:
                await sandbox.close()
        except BaseException:
            await asyncio.shield(asyncio.gather(*(sandbox.close() for sandbox in made)))
            raise
        return made[-1]


class ResetBackend(LocalBackend):
    """Each sandbox was used by somebody else."""

    async def create(self, spec: SandboxSpec) -> HostSandbox:
        sandbox = await super().create(spec)
        try:
            base = await sandbox.checkpoint()
            await sandbox.exec(USED, timeout=60)
            await sandbox.reset(base, labels=spec.labels)
        except BaseException:
            await asyncio.shield(sandbox.close())
            raise
        return sandbox
