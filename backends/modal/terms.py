"""What Modal takes: limits that it can enforce, and tags."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping

from backends.errors import BackendUnavailable
from backends.owner import this_owner
from backends.spec import SandboxSpec, reject_fields

MARK = ("lachesis", "sandbox")  # tag of all sandboxes of this module
_LONGEST = 24 * 3600.0
MARGIN = 30  # seconds by which Modal's timeout exceeds the lifetime, which starts after the start-up
_TAG = re.compile(r"[A-Za-z0-9._-]{1,63}\Z")


def reject(spec: SandboxSpec) -> None:
    """Raise `BackendUnavailable` for what Modal cannot enforce."""
    unable = "backend 'modal' cannot enforce"
    reject_fields("modal", spec, "root")
    if spec.pids:
        raise BackendUnavailable(f"{unable} pids: Modal has no limit of processes. Next step: leave `pids` out")
    if spec.disk_bytes:
        raise BackendUnavailable(f"{unable} disk_bytes: Modal has no limit of disk. Next step: leave `disk_bytes` out")
    if spec.lifetime > _LONGEST - MARGIN:
        longest = f"{_LONGEST - MARGIN:.0f} s"
        raise BackendUnavailable(f"{unable} a lifetime of {spec.lifetime:g} s. Next step: ask for at most {longest}")
    if spec.memory_bytes and spec.memory_bytes < 1 << 20:
        raise BackendUnavailable(
            f"{unable} memory_bytes={spec.memory_bytes}: Modal counts in MiB. Next step: ask for more"
        )


def tag(value: str) -> str:
    """`value` if Modal accepts it as a tag, else a readable text with a digest."""
    if _TAG.match(value):
        return value
    digest = hashlib.sha256(value.encode()).hexdigest()[:12]
    return f"{re.sub('[^A-Za-z0-9._-]', '-', value)[:50]}.{digest}"


def tags_of(id: str, labels: Mapping[str, str]) -> dict[str, str]:
    tags = {**{tag(key): tag(value) for key, value in labels.items() if value}, "id": id, "owner": this_owner()}
    return {**tags, "created": str(int(time.time())), **dict([MARK])}
