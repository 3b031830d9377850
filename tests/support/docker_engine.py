"""A private Docker engine for tests: no network set-up, separate folders and cgroups, removed at the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.root_images import bare_root, full_root, root_archive

FULL_IMAGE = "lachesis-test:full"
"""bash, coreutils and Python, see `full_root`; for containers that run as root."""
BARE_IMAGE = "lachesis-test:bare"
"""Only busybox."""
AGENT_IMAGE = "lachesis-test:agent"
"""`FULL_IMAGE` for uid 1000, with variables, a working directory and an entry point."""


class DockerEngine:
    """A running dockerd. `options` go to `create_backend("docker", ...)`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "docker.sock"
        self._cgroup = f"lachesis-{folder.name}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"url": f"unix://{self.socket}", "image": FULL_IMAGE, "pull": "never"}

    def start(self, *arguments: str) -> None:
        """Also after `kill`: with the same images and the engine's record of its containers."""
        dockerd, setpriv = shutil.which("dockerd"), shutil.which("setpriv")
        if dockerd is None or setpriv is None:
            raise RuntimeError("dockerd is not installed here (Debian: apt-get install docker.io)")
        if os.geteuid() != 0:
            raise RuntimeError("the tests' Docker engine has to be started by root")
        command = [setpriv, "--pdeathsig", "TERM", dockerd, "--host", f"unix://{self.socket}"]
        command += ["--data-root", str(self.folder / "data"), "--exec-root", str(self.folder / "exec")]
        command += ["--pidfile", str(self.folder / "pid"), "--cgroup-parent", f"/{self._cgroup}"]
        command += ["--bridge=none", "--iptables=false", "--ip6tables=false", "--ip-forward=false"]
        command += ["--shutdown-timeout", "1", *arguments]
        (self.folder / "pid").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + 60
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                tail = (self.folder / "log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"dockerd does not start:\n{tail}")
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL, like a crash: its containers continue."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        # Its containerd dies with it, and may stay a zombie for a while, which the next engine would mistake.
        (self.folder / "exec/containerd/containerd.pid").unlink(missing_ok=True)

    def call(self, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> Any:
        """One request to the engine, without our code. Returns the decoded JSON, or the text."""
        connection = _UnixConnection(str(self.socket))
        try:
            connection.request(method, path, body, {"Content-Type": content_type} if body else {})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status >= 400:
            raise RuntimeError(f"{method} {path}: {answer.status} {data.decode(errors='replace')}")
        try:
            return json.loads(data)
        except ValueError:
            return data.decode(errors="replace")

    def containers(self) -> list[str]:
        """Names of all containers, ended ones included."""
        return [row["Names"][0].lstrip("/") for row in self.call("GET", "/containers/json?all=1")]

    def add_image(self, name: str, root: Path) -> None:
        repository, _, tag = name.partition(":")
        path = f"/images/create?fromSrc=-&repo={repository}&tag={tag}"
        answer = self.call("POST", path, root_archive(root), "application/x-tar")
        if "error" in str(answer):
            raise RuntimeError(f"image {name}: {answer}")

    def derive_image(self, name: str, base: str, config: dict[str, Any]) -> None:
        """The same files with another configuration."""
        body = json.dumps({"Image": base, "Cmd": ["/never-started"]}).encode()
        container = self.call("POST", "/containers/create", body)["Id"]
        repository, _, tag = name.partition(":")
        path = f"/commit?container={container}&repo={repository}&tag={tag}"
        self.call("POST", path, json.dumps(config).encode())
        self.call("DELETE", f"/containers/{container}")

    def _answers(self) -> bool:
        try:
            return bool(self.call("GET", "/_ping") == "OK")
        except (OSError, http.client.HTTPException, RuntimeError):
            return False

    def stop(self) -> None:
        """End it and everything that it started, as far as possible, in any state."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=15)
            self._process.kill()
            self._process.wait()
        self._kill_rest()
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
        for point in reversed([line.split()[4] for line in mounts]):
            if point.startswith(f"{self.folder}/"):
                subprocess.run(["umount", "--lazy", point], check=False, capture_output=True)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _kill_rest(self) -> None:
        """Containers are known by their cgroup; containerd and its shims by a folder in their arguments."""
        groups = [path for path in Path("/sys/fs/cgroup").glob(f"*/{self._cgroup}") if path.is_dir()]
        groups += [path for path in [Path("/sys/fs/cgroup") / self._cgroup] if path.is_dir()]
        end = time.monotonic() + 10
        while time.monotonic() < end:
            pids = {int(word) for group in groups for path in _below(group) for word in _words(path / "cgroup.procs")}
            for entry in Path("/proc").iterdir():
                if entry.name.isdigit():
                    with contextlib.suppress(OSError):
                        if re.search(rb"%s/" % bytes(self.folder), (entry / "cmdline").read_bytes()):
                            pids.add(int(entry.name))
            pids.discard(os.getpid())
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for group in groups:
                for path in reversed(_below(group)):
                    with contextlib.suppress(OSError):
                        path.rmdir()
            if not pids and not any(group.exists() for group in groups):
                return
            time.sleep(0.02)


def _below(group: Path) -> list[Path]:
    return [group, *sorted(path for path in group.rglob("*") if path.is_dir())] if group.exists() else []


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextlib.contextmanager
def docker_engine(roots: Path, images: Sequence[str] = (FULL_IMAGE, BARE_IMAGE, AGENT_IMAGE)) -> Iterator[DockerEngine]:
    """An engine with these images. `roots` is the folder for their root file systems.

    Raises:
        RuntimeError: the engine cannot run here. The message says what to install.
    """
    engine = DockerEngine(Path(tempfile.mkdtemp(prefix="ltd-", dir="/tmp")))  # sockets need a short path
    try:
        engine.start()
        if FULL_IMAGE in images:
            engine.add_image(FULL_IMAGE, full_root(roots / "full"))
        if BARE_IMAGE in images:
            engine.add_image(BARE_IMAGE, bare_root(roots / "bare"))
        if AGENT_IMAGE in images:
            changes = {
                "User": "agent",
                "Env": ["FLAVOUR=agent"],
                "WorkingDir": "/home/agent",
                "Entrypoint": ["/bin/false"],
            }
            engine.derive_image(AGENT_IMAGE, FULL_IMAGE, changes)
        yield engine
    finally:
        engine.stop()
