"""The client of a Docker engine (or podman): finding it, its capabilities, and its errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp

from backends.errors import BackendError, BackendUnavailable

PATIENCE = 120.0
"""Seconds after which a request fails; pulling an image has no limit."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_INSTALL = "apt-get install docker.io, or https://docs.docker.com/engine/install; or set url / DOCKER_HOST"


class EngineError(BackendError):
    """A request failed. `status` is the HTTP status, 0 when the engine could not be reached."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Engine:
    """The address of an engine."""

    url: str
    """`unix://PATH`, `tcp://HOST:PORT`, `https://HOST:PORT` or `ssh://USER@HOST`."""
    tls: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem."""

    @property
    def is_local(self) -> bool:
        """Whether it may share this machine's files. A forwarded socket looks the same."""
        return self.url.startswith("unix://")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties that an engine reports."""

    product: str
    """`Docker` or `Podman`."""
    version: str
    api: str
    """Version of its API: `v1.41`."""
    rootless: bool
    memory_limit: bool
    cpu_limit: bool
    pids_limit: bool
    cpus: float
    """Processors of its machine."""
    selinux: bool
    """Whether containers are labelled, which may keep them from files that are bound into them."""
    storage: str
    """Storage driver and its file system: `overlay2 on extfs`."""
    architecture: str
    """As in `uname -m`: `x86_64`."""
    userns: bool = False
    """Whether user 0 inside is another user outside: by remapping, or since the engine is rootless."""
    runtimes: tuple[str, ...] = ()
    """Its OCI runtimes."""
    seccomp: str = ""
    """Its profile of system calls: `default` or `builtin`, `unconfined`, a path; empty where it reports none."""


def find_engine(url: str | None = None) -> Engine:
    """`url`, else `DOCKER_HOST`, else the Docker CLI's current context, else the usual sockets, podman's last.

    Raises:
        BackendUnavailable: there is none.
    """
    certificates = os.environ.get("DOCKER_CERT_PATH") if os.environ.get("DOCKER_TLS_VERIFY") else None
    named = url or (None if os.environ.get("DOCKER_CONTEXT") else os.environ.get("DOCKER_HOST"))
    engine = Engine(named, Path(certificates) if certificates else None) if named else _context() or _socket()
    if engine is None:
        raise BackendUnavailable(f"no Docker engine was found on this machine: {_INSTALL}")
    scheme = engine.url.partition("://")[0]
    if scheme not in ("unix", "tcp", "http", "https", "ssh"):
        raise BackendUnavailable(
            f"the address {engine.url!r} of the Docker engine is invalid: use unix://, tcp://, https:// or ssh://"
        )
    return engine


def _context() -> Engine | None:
    """The engine of the Docker CLI's current context, None for the default context."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    name = os.environ.get("DOCKER_CONTEXT")
    if name is None:
        with contextlib.suppress(OSError, ValueError):
            name = json.loads((folder / "config.json").read_bytes()).get("currentContext")
    if not name or name == "default":
        return None
    digest = hashlib.sha256(name.encode()).hexdigest()
    try:
        meta = json.loads((folder / "contexts/meta" / digest / "meta.json").read_bytes())
        host = str(meta["Endpoints"]["docker"]["Host"])
    except (OSError, ValueError, KeyError) as error:
        raise BackendUnavailable(
            f"the Docker context {name!r} cannot be read ({error}): see `docker context ls`, or set url / DOCKER_HOST"
        ) from error
    tls = folder / "contexts/tls" / digest / "docker"
    return Engine(host, tls if tls.is_dir() else None)


def _socket() -> Engine | None:
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    home = Path.home()
    for path in (
        *["/run/docker.sock", "/var/run/docker.sock", f"{runtime}/docker.sock", f"{home}/.docker/run/docker.sock"],
        *[f"{runtime}/podman/podman.sock", "/run/podman/podman.sock"],
    ):
        with contextlib.suppress(OSError):
            if Path(path).is_socket() and os.access(path, os.W_OK):
                return Engine(f"unix://{path}")
    return None


def _ssl_context(folder: Path) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except OSError as error:
        raise BackendUnavailable(
            f"the Docker engine's certificates in {folder} cannot be used ({error}): "
            "it needs ca.pem, cert.pem and key.pem there"
        ) from error
    return context


def open_client(engine: Engine, api_version: str = "auto") -> aiodocker.Docker:
    """A client for the running event loop. Close it with `close_client`."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    connector: aiohttp.BaseConnector
    if engine.url.startswith("ssh://"):
        return aiodocker.Docker(url=engine.url, timeout=timeout, api_version=api_version)
    if engine.is_local:
        connector, url = aiohttp.UnixConnector(engine.url.removeprefix("unix://"), limit=0), "http://localhost"
    else:
        secure = engine.tls is not None or engine.url.startswith("https://")
        connector = aiohttp.TCPConnector(ssl=_ssl_context(engine.tls) if engine.tls else True, limit=0)
        url = f"{'https' if secure else 'http'}://{engine.url.partition('://')[2]}"
    return aiodocker.Docker(url=url, connector=connector, timeout=timeout, api_version=api_version)


async def close_client(docker: aiodocker.Docker) -> None:
    await docker.close()
    await docker.connector.close()


@contextlib.asynccontextmanager
async def client(engine: Engine, api_version: str = "auto") -> AsyncIterator[aiodocker.Docker]:
    docker = open_client(engine, api_version)
    try:
        yield docker
    finally:
        await close_client(docker)


@contextlib.asynccontextmanager
async def explained(engine: Engine, what: str, patience: float | None = PATIENCE) -> AsyncIterator[None]:
    """Turn the errors of one request, a late answer too, into an `EngineError` that starts with `what`."""
    try:
        async with asyncio.timeout(patience):
            yield
    except aiodocker.DockerError as error:
        if error.status == 900:
            raise _unreachable(engine, what, error.__cause__ or error.__context__ or error) from error
        raise EngineError(f"{what}: {error.message}", error.status) from error
    except TimeoutError:
        raise _unreachable(engine, what, "it does not answer in time") from None
    except (aiohttp.ClientError, OSError) as error:
        raise _unreachable(engine, what, " ".join(str(error).split())) from error
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        message = f"{what}: the answer of {engine.url} is not from a Docker engine ({text}); is its address right?"
        raise EngineError(message, 0) from error


def _unreachable(engine: Engine, what: str, reason: object) -> EngineError:
    step = "is it running (systemctl start docker), and may this user use it (group docker)?"
    if not engine.is_local:
        step = "is its address right, and does it run?"
    return EngineError(f"{what}: the Docker engine at {engine.url} cannot be reached ({reason}); {step}", 0)


async def request(
    docker: aiodocker.Docker, method: str, path: str, params: Mapping[str, str] | None = None
) -> tuple[int, Mapping[str, str], bytes]:
    """A request for which aiodocker has no method: status, headers and body, also of errors."""
    url = f"{docker.docker_host}/{docker.api_version}/{path}"
    async with docker.session.request(method, url, params=params) as answer:
        return answer.status, answer.headers, await answer.read()


async def upload(docker: aiodocker.Docker, container: str, folder: str, archive: bytes) -> None:
    """Unpack a tar file in a folder of a container, which need not run."""
    url = f"{docker.docker_host}/{docker.api_version}/containers/{container}/archive"
    headers = {"Content-Type": "application/x-tar"}
    async with docker.session.put(url, params={"path": folder}, data=io.BytesIO(archive), headers=headers) as answer:
        if answer.status >= 400:
            raise aiodocker.DockerError(answer.status, (await answer.read()).decode(errors="replace"))


async def engine_info(docker: aiodocker.Docker, engine: Engine) -> EngineInfo:
    """The properties of the engine.

    Raises:
        BackendUnavailable: it runs no Linux containers.
        EngineError: it does not answer.
    """
    async with explained(engine, "reading the engine's properties"):
        version = await docker.version()
        info = await docker.system.info()
        return _facts(version, info, engine)


def _facts(version: Mapping[str, Any], info: Mapping[str, Any], engine: Engine) -> EngineInfo:
    if version.get("Os", "linux") != "linux":
        raise BackendUnavailable(f"the engine at {engine.url} runs {version['Os']} containers: switch it to Linux ones")
    components = " ".join(str(part.get("Name")) for part in version.get("Components") or [])
    options = " ".join(info.get("SecurityOptions") or [])
    backing = dict(row[:2] for row in info.get("DriverStatus") or [] if len(row) >= 2).get("Backing Filesystem", "?")
    return EngineInfo(
        product="Podman" if "Podman" in components else "Docker",
        version=str(version.get("Version", "?")),
        api=f"v{version['ApiVersion']}",
        rootless="rootless" in options,
        memory_limit=bool(info.get("MemoryLimit")),
        cpu_limit=bool(info.get("CpuCfsQuota")),
        pids_limit=bool(info.get("PidsLimit")),
        cpus=float(info.get("NCPU") or 1),
        selinux="selinux" in options,
        storage=f"{info.get('Driver', '?')} on {backing}",
        architecture=_MACHINES.get(version.get("Arch", ""), str(version.get("Arch"))),
        userns="rootless" in options or "name=userns" in options,
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        seccomp=(re.findall(r"name=seccomp,profile=(\S+)", options) or [""])[0],
    )


def _limits(facts: EngineInfo) -> dict[str, bool]:
    return {"memory": facts.memory_limit, "cpu": facts.cpu_limit, "pids": facts.pids_limit}


def limit_line(facts: EngineInfo) -> str:
    """`Availability.limits`."""
    held = ", ".join(name for name, works in _limits(facts).items() if works)
    return f"{held or 'none'} by the engine; disk: by the storage driver ({facts.storage}), else folders in memory"


def description(facts: EngineInfo, engine: Engine) -> str:
    """One line for `check`."""
    missing = ", ".join(name for name, works in _limits(facts).items() if not works)
    line = f"{facts.product} {facts.version} at {engine.url}{', rootless' if facts.rootless else ''}"
    return line + (f"; it cannot limit {missing}" if missing else "")


def advice(error: Exception) -> str:
    """The next step after a failed `check`."""
    text = str(error)
    if "Permission denied" in text:
        return "let this user use the engine (usermod -aG docker USER, then log in again), or run rootless Docker"
    if "No such file" in text or "Connection refused" in text or "Cannot connect" in text:
        return f"start the engine (systemctl start docker); if it is not installed: {_INSTALL}"
    return "see the engine's log (journalctl -u docker)"
