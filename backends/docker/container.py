"""The configuration of containers, as pure functions of a spec, an image and the properties of the engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.errors import BackendUnavailable, SandboxExhausted, SandboxLost
from backends.executor.kernel import MACHINES, STARVED
from backends.host.kernel import IPC_LIMITS
from backends.limits import DISK, MEMORY, with_defaults
from backends.spec import SandboxInfo, SandboxSpec, disk_in_memory

from . import seccomp
from .client import EngineInfo

LABEL = "lachesis."
ID, OWNER = f"{LABEL}id", f"{LABEL}owner"
CHECKPOINT = f"{LABEL}checkpoint"
"""Of an image: who has made the checkpoint."""
PIDS = 1024
"""The default limit of processes, against fork bombs."""
LIMITS = ("cpus", "memory_bytes", "pids")
_SHM_BYTES = 64 << 20
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of all sandboxes of a backend; see `DockerBackend`."""

    user: str | None = None
    network: str = "bridge"
    read_only: bool = False
    runtime: str | None = None
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Image:
    """The relevant properties of an image."""

    id: str
    env: Mapping[str, str]
    workdir: str
    """Empty if the image has none."""
    user: str
    volumes: tuple[str, ...]
    has_healthcheck: bool = False
    size: int = 0
    """In bytes."""

    @classmethod
    def of(cls, inspected: Mapping[str, Any]) -> Image:
        """Read them from the engine's description."""
        config = inspected.get("Config") or inspected.get("ContainerConfig") or {}
        variables = (line.partition("=") for line in config.get("Env") or [])
        return cls(
            id=str(inspected["Id"]),
            env={name: value for name, _, value in variables if name},
            workdir=str(config.get("WorkingDir") or "").rstrip("/"),
            user=str(config.get("User") or ""),
            volumes=tuple(config.get("Volumes") or ()),
            has_healthcheck=bool(config.get("Healthcheck")),
            size=int(inspected.get("Size") or 0),
        )


@dataclass(frozen=True, slots=True)
class Account:
    """The account that runs the commands."""

    home: str
    uid: int
    gid: int
    name: str | None = None


ROOT = Account("/root", 0, 0, "root")


def is_root(user: str) -> bool:
    return user.partition(":")[0] in ("", "0", "root")


def account(user: str, passwd: Iterable[str]) -> Account:
    """The account of `user`, a name or number with an optional group, from the lines of the image's /etc/passwd.

    Raises:
        BackendUnavailable: /etc/passwd does not have the name.
    """
    wanted, _, group = user.partition(":")
    for line in passwd:
        fields = line.rstrip("\n").split(":")
        if len(fields) >= 6 and wanted in (fields[0], fields[2]):
            gid = group if group.isdigit() else fields[3]
            return Account(fields[5] or "/", int(fields[2]), int(gid), fields[0])
    if not wanted.isdigit():
        raise BackendUnavailable(f"the image has no user {wanted!r}: use a number, or a name of its /etc/passwd")
    return Account("/", int(wanted), int(group) if group.isdigit() else 0)


def workdir(spec: SandboxSpec, image: Image, account: Account) -> str:
    """The folder of the spec, else of the image, else /workspace for root, and home or /tmp for others."""
    home = account.home if account.home != "/" else "/tmp"
    return spec.workdir or image.workdir or ("/workspace" if account == ROOT else home)


def environment(image: Image, account: Account, workdir: str, *, read_only: bool) -> dict[str, str]:
    """Variables of commands before those of the spec: the image's, and the usual ones."""
    names = {"USER": account.name, "LOGNAME": account.name} if account.name else {}
    home = workdir if read_only or account.home == "/" else account.home
    return {"PATH": _PATH, "LANG": "C.UTF-8", "TERM": "dumb", "HOME": home, **names, **image.env}


def labels(id: str, spec: SandboxSpec, owner: str, created: float) -> dict[str, str]:
    return {
        ID: id,
        f"{LABEL}run_id": spec.labels.get("run_id", ""),
        f"{LABEL}task_id": spec.labels.get("task_id", ""),
        OWNER: owner,
        f"{LABEL}created": f"{created:.3f}",
    }


def listed(row: Mapping[str, Any]) -> SandboxInfo:
    """The sandbox of a row of the engine's list of containers."""
    labels = row.get("Labels") or {}  # the image's, too
    found = {name.removeprefix(LABEL): value for name, value in labels.items() if name.startswith(LABEL)}
    return SandboxInfo.of("docker", found["id"], found, f"{row.get('State', '?')}, image {row.get('Image', '?')}")


_MASKED = [
    # Docker's default list, which this one replaces.
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    # For root only; and root in a container is root for the kernel.
    "/proc/kallsyms",
    "/proc/pagetypeinfo",
    "/proc/slabinfo",
    "/proc/vmallocinfo",
]
_READ_ONLY = [
    "/dev",  # a disk in memory beside those that have a limit; /dev/shm and devices stay writable
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys",
    "/proc/sysrq-trigger",
    # PID 1 is the executor, with the same user: a command could make the kernel kill it first.
    "/proc/1/autogroup",
    "/proc/1/oom_adj",
    "/proc/1/oom_score_adj",
    "/proc/1/task/1/oom_adj",
    "/proc/1/task/1/oom_score_adj",
    "/proc/pressure",
]


def container(
    spec: SandboxSpec,
    image: Image,
    facts: EngineInfo,
    options: Options,
    *,
    workdir: str,
    command: Sequence[str],
    mounts: Sequence[Mapping[str, Any]],
    labels: Mapping[str, str],
    scratch: Sequence[str],
    quota: int | None,
) -> dict[str, Any]:
    """The configuration of a container that runs `command`, the executor.

    The engine creates `workdir` for root. `scratch` are folders in memory, each limited to `disk_bytes`; if there are
    any, the rest is read-only. `quota` is the engine's limit of the root file system.

    Raises:
        BackendUnavailable: the engine cannot enforce the spec.
    """
    host: dict[str, Any] = {
        "AutoRemove": True,
        "CapDrop": ["ALL"],
        "CapAdd": list(options.capabilities),
        "SecurityOpt": security_options(facts),
        "MaskedPaths": _MASKED,
        "ReadonlyPaths": _READ_ONLY,
        "NetworkMode": options.network if spec.network else "none",
        "LogConfig": {"Type": "none", "Config": {}},
        "Mounts": list(mounts),
        **limits(spec, facts),
    }
    if options.runtime:
        host["Runtime"] = options.runtime
    elif not facts.rootless:  # it may not write them
        host["Sysctls"] = dict(IPC_LIMITS)
    in_memory = min(spec.disk_bytes or DISK, (spec.memory_bytes or MEMORY) // 2)
    if scratch:
        in_memory = disk_in_memory(spec, file_systems=1 + len(scratch))
    host["ShmSize"] = min(_SHM_BYTES, in_memory)
    if spec.disk_bytes and image.volumes:
        raise BackendUnavailable(
            f"disk_bytes cannot be enforced for this image: it declares volumes ({', '.join(image.volumes)}), "
            "which cannot be limited; leave disk_bytes out, or use an image without VOLUME"
        )
    if scratch:
        host["ReadonlyRootfs"] = True
        host["Tmpfs"] = dict.fromkeys(scratch, f"rw,exec,nosuid,nodev,mode=1777,size={in_memory}")
    elif quota:
        host["StorageOpt"] = {"size": str(quota)}
    config: dict[str, Any] = {
        "Image": image.id,
        "Entrypoint": list(command),
        "Cmd": [],
        # The loader of the runtime would obey it. Variables of commands go to the executor: here, everyone who may
        # inspect containers could read them.
        "Env": ["LD_PRELOAD="] if "LD_PRELOAD" in image.env else [],
        "WorkingDir": workdir,
        "Hostname": "sandbox",
        "Labels": dict(labels),
        "StopSignal": "SIGKILL",
        "HostConfig": host,
    }
    if image.has_healthcheck:
        config["Healthcheck"] = {"Test": ["NONE"]}
    if options.user is not None:
        config["User"] = options.user
    return config


def enforced(facts: EngineInfo) -> list[str]:
    """The `LIMITS` that the engine can enforce."""
    works = (facts.cpu_limit, facts.memory_limit, facts.pids_limit)
    return [field for field, can in zip(LIMITS, works, strict=True) if can]


def limited(spec: SandboxSpec, facts: EngineInfo, *, file_systems: int) -> SandboxSpec:
    """`spec` with the defaults of its `LIMITS`; see `with_defaults`."""
    return with_defaults(spec, enforced(facts), processors=facts.cpus, pids=PIDS, file_systems=file_systems)


def default_disk(image: Image, facts: EngineInfo) -> int | None:
    """`disk_bytes` of a spec that does not set it: a limit that the engine's storage can enforce without any loss."""
    driver, _, backing = facts.storage.partition(" on ")
    if driver in ("btrfs", "zfs"):  # they count the image as well
        return image.size + DISK
    return DISK if (driver, backing) == ("overlay2", "xfs") else None


def security_options(facts: EngineInfo) -> list[str]:
    pinned = facts.seccomp == "unconfined" and facts.architecture in MACHINES
    return ["no-new-privileges", *([f"seccomp={seccomp.profile(facts.architecture)}"] if pinned else [])]


def limits(spec: SandboxSpec, facts: EngineInfo) -> dict[str, Any]:
    """The limits of processor time, memory (without swap) and processes."""
    host: dict[str, Any] = {}
    if spec.memory_bytes is not None:
        _require(facts.memory_limit, "memory_bytes", facts)
        host["Memory"] = host["MemorySwap"] = spec.memory_bytes
    if spec.cpus is not None and spec.cpus < facts.cpus:  # the engine rejects more processors than it has
        _require(facts.cpu_limit, "cpus", facts)
        host["NanoCpus"] = max(int(spec.cpus * 1e9), 10_000_000)
    if spec.pids is not None:
        _require(facts.pids_limit, "pids", facts)
    if facts.pids_limit:
        host["PidsLimit"] = spec.pids or -1
    return host


def _require(works: bool, field: str, facts: EngineInfo) -> None:
    if not works:
        why, step = why_not(facts)
        raise BackendUnavailable(f"{field} cannot be enforced by this engine: {why}; leave {field} out, or {step}")


def why_not(facts: EngineInfo) -> tuple[str, str]:
    """Why an engine enforces no limits, and the next step."""
    why = "a rootless engine needs cgroup v2 with delegation" if facts.rootless else "its cgroups do not allow it"
    return f"{facts.product} {facts.version}: {why}", "use an engine whose `docker info` shows no warning about it"


def is_quota_rejected(message: str) -> bool:
    """Whether the engine rejected a size for the root. Drivers word it differently."""
    text = message.lower()
    return ("storage" in text and ("opt" in text or "size" in text)) or "quota" in text


def is_missing_source(message: str) -> bool:
    """Whether a folder of this machine does not exist on the engine's machine."""
    text = message.lower()
    return "bind source path does not exist" in text or ("statfs" in text and "no such file" in text)


def ending(events: Iterable[Mapping[str, Any]], spec: SandboxSpec) -> SandboxLost:
    """Why a container ended, from the engine's events."""
    exit_code, out_of_memory, killed = None, False, False
    for event in events:
        action = str(event.get("Action") or event.get("status") or "")
        out_of_memory = out_of_memory or action == "oom"
        killed = killed or action == "kill"
        if action in ("die", "died"):
            exit_code = ((event.get("Actor") or {}).get("Attributes") or {}).get("exitCode")
    if exit_code is None:
        return SandboxLost("its container is gone")
    if out_of_memory and str(exit_code) in ("137", str(STARVED)) and not killed:
        if spec.memory_bytes is None:
            return SandboxLost("it ran out of memory as a whole")
        return SandboxExhausted(f"it ran out of memory as a whole (memory_bytes is {spec.memory_bytes})")
    if killed:
        return SandboxLost(f"its container was killed or removed from outside (exit code {exit_code})")
    return SandboxLost(f"its container ended (exit code {exit_code})")
