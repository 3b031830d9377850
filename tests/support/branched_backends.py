"""Backends whose sandboxes have had a life before: children of a used parent, and such that were used and reset."""

from __future__ import annotations

from backends import SandboxSpec
from backends.host.sandboxes import HostSandbox
from backends.local import LocalBackend

USED = """
    for folder in /workspace /tmp /dev/shm /home/agent /usr/local/bin; do echo used > $folder/used; done
    ipcmk -M 1000 > /dev/null; cd /tmp; export USED=1; rm -rf /usr/share/doc; sleep 1000 &
"""


class ForkedBackend(LocalBackend):
    """Each sandbox is the child of a child of one that is gone."""

    async def create(self, spec: SandboxSpec) -> HostSandbox:
        sandbox = await super().create(spec)
        for _ in range(2):
            try:
                child = await sandbox.fork(labels=spec.labels)
                await sandbox.exec("echo other > /workspace/other; echo other > /dev/shm/other", timeout=60, fresh=True)
            finally:
                await sandbox.close()
            sandbox = child
        return sandbox


class ResetBackend(LocalBackend):
    """Each sandbox was used by somebody else."""

    async def create(self, spec: SandboxSpec) -> HostSandbox:
        sandbox = await super().create(spec)
        try:
            base = await sandbox.checkpoint()
            await sandbox.exec(USED, timeout=60)
            await sandbox.reset(base, labels=spec.labels)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox
