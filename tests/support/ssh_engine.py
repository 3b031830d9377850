"""A private sshd on loopback, for tests, with separate keys, settings and state, and a connection that can fail.

It runs as the user of the tests, and lets that user in. For root it can also let in an ordinary user, who exists only
in the sshd's mount namespace.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.host import cgroups
from tests.support.ports import free_port

PACKAGES = "apt-get install --no-install-recommends openssh-server bubblewrap"
ORDINARY_USER, ORDINARY_UID = "rollouts", 61234
SETTINGS = {
    "ListenAddress": "127.0.0.1",
    "UsePAM": "no",
    "StrictModes": "no",
    "PasswordAuthentication": "no",
    "PermitRootLogin": "prohibit-password",
    "MaxStartups": "200:30:400",
    "SetEnv": "SHLVL=1",  # bash reads its start-up files in the first level only
}


class FaultyWire:
    """A proxy from a TCP port of loopback to another or to a Unix socket, which stalls, cuts and resets on command."""

    def __init__(self, target: int | Path) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.accepted = 0
        """The connections that were passed on."""
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._lock = threading.Lock()
        self._stalled = self._refusing = self._closed = False
        self._left: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stall(self) -> None:
        """Stall: nothing passes, and nothing breaks."""
        self._stalled = True

    def restore(self) -> None:
        """Let everything pass again."""
        self._stalled = self._refusing = False

    def cut(self) -> None:
        """Reset all connections and every new one."""
        self._refusing = True
        self.reset()

    def reset(self) -> None:
        """Reset all connections, and let new ones pass."""
        with self._lock:
            self._reset()

    def reset_after(self, size: int) -> None:
        """Reset all connections after `size` more bytes have been sent."""
        self._left = size

    def close(self) -> None:
        self._closed = True
        self._thread.join()
        self._listener.close()
        self.reset()

    def _reset(self) -> None:
        for end in self._pairs:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            end.close()
        self._pairs.clear()

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                ends = [] if self._stalled else [end for end in self._pairs if end.fileno() >= 0]
            try:
                readable = select.select([self._listener, *ends], [], [], 0.02)[0]
            except (OSError, ValueError):  # one of them was closed meanwhile
                continue
            with self._lock:
                for end in readable:
                    if end is self._listener:
                        self._accept()
                    elif end in self._pairs:
                        self._copy(end)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self._refusing:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            return
        try:
            if isinstance(self._target, int):
                server = socket.create_connection(("127.0.0.1", self._target))
            else:
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self._target))
        except OSError:  # the target is down
            client.close()
            return
        for end in (client, server):
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.settimeout(30)
        self._pairs.update({client: server, server: client})
        self.accepted += 1

    def _copy(self, end: socket.socket) -> None:
        other = self._pairs[end]
        try:
            data = end.recv(1 << 16)
            other.sendall(data)
        except OSError:
            data = b""
        if not data:
            for half in (end, other):
                half.close()
                self._pairs.pop(half, None)
            return
        if self._left is not None and end.family == socket.AF_INET and end.getsockname()[1] == self.port:
            self._left -= len(data)
            if self._left <= 0:
                self._left = None
                self._reset()


@dataclass
class SshEngine:
    """A running sshd. `options` are those of the backend `ssh`."""

    folder: Path
    port: int
    user: str
    state: Path
    """The folder for the state of its sandboxes: the backend's option `folder`."""
    options: dict[str, Any] = field(default_factory=dict)
    groups: list[Path] = field(default_factory=list)
    """Where it makes cgroups for sandboxes: with version 1, in groups of its own."""

    @contextlib.contextmanager
    def wire(self) -> Iterator[tuple[FaultyWire, dict[str, Any]]]:
        """A faulty connection to it, and the options that use it."""
        wire = FaultyWire(self.port)
        known = self.folder / f"known_hosts.{wire.port}"
        known.write_text(self.known_hosts_line(wire.port))
        try:
            yield wire, {**self.options, "port": wire.port, "known_hosts": str(known)}
        finally:
            wire.close()

    def known_hosts_line(self, port: int, key: str = "host_key.pub") -> str:
        return f"[127.0.0.1]:{port} {(self.folder / key).read_text()}"

    def new_key(self, name: str) -> Path:
        path = self.folder / name
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        return path


@contextlib.contextmanager
def ssh_engine(*, ordinary_user: bool = False, **settings: str) -> Iterator[SshEngine]:
    """Start one. `settings` are added to `SETTINGS` in its sshd_config.

    Raises:
        RuntimeError: sshd is missing or does not start; the message says what to do.
    """
    sshd = shutil.which("sshd") or shutil.which("/usr/sbin/sshd")
    if sshd is None or shutil.which("ssh-keygen") is None:
        raise RuntimeError(f"there is no sshd. Next step: {PACKAGES}")
    folder, state = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("ssh-engine-", "ssh-state-"))
    folder.chmod(0o755)
    user = ORDINARY_USER if ordinary_user else getpass.getuser()
    made = None
    process = engine = None
    try:
        if os.geteuid() == 0 and not Path("/run/sshd").exists():
            made = Path("/run/sshd")  # where sshd confines its unprivileged part
            made.mkdir(mode=0o755)
        port = free_port()
        engine = SshEngine(folder, port, user, state)
        host_key, user_key = engine.new_key("host_key"), engine.new_key("user_key")
        shutil.copy(user_key.with_suffix(".pub"), folder / "authorized_keys")
        own = {"Port": str(port), "HostKey": str(host_key), "AuthorizedKeysFile": str(folder / "authorized_keys")}
        own["PidFile"] = "none"
        config = folder / "sshd_config"
        config.write_text("".join(f"{name} {value}\n" for name, value in {**SETTINGS, **own, **settings}.items()))
        (folder / "known_hosts").write_text(engine.known_hosts_line(port))
        engine.options = {
            "host": "127.0.0.1",
            "port": port,
            "username": user,
            "client_keys": [str(user_key)],
            "known_hosts": str(folder / "known_hosts"),
            "config": [],
            "folder": str(state),
        }
        command = [sshd, "-D", "-e", "-f", str(config)]
        if ordinary_user:
            command = _with_ordinary_user(folder, command)
            os.chown(state, ORDINARY_UID, ORDINARY_UID)
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={"PATH": os.defpath}
            )
        engine.groups = _own_groups(folder.name, process.pid)
        _wait_until_up(process, port, folder / "log")
        yield engine
    finally:
        if process is not None:
            process.terminate()
            process.wait()
            for group in engine.groups if engine is not None else []:
                _remove_group(group)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(state, ignore_errors=True)
        if made is not None:
            with contextlib.suppress(OSError):
                made.rmdir()


def _own_groups(name: str, pid: int) -> list[Path]:
    """Move a process to cgroups that others do not use, as far as that is possible."""
    found = cgroups.find()
    if found.version != 1:
        return list({*found.parents.values()})
    groups = [parent / name for parent in {*found.parents.values()}]
    for group in groups:
        group.mkdir()
        (group / "cgroup.procs").write_text(str(pid))
    return groups


def _remove_group(group: Path) -> None:
    """Remove what `_own_groups` has made, and end its processes."""
    end = time.monotonic() + 5
    while group.name.startswith("ssh-engine-") and group.exists() and time.monotonic() < end:
        with contextlib.suppress(OSError):
            for pid in (group / "cgroup.procs").read_text().split():  # sessions outlive their sshd
                os.kill(int(pid), signal.SIGKILL)
            for path in [*group.glob("lachesis"), group]:
                path.rmdir()
        time.sleep(0.02)


def _with_ordinary_user(folder: Path, command: list[str]) -> list[str]:
    """`command` in a mount namespace whose /etc/passwd has one more user."""
    home = folder / "home"
    home.mkdir()
    os.chown(home, ORDINARY_UID, ORDINARY_UID)
    passwd, group = folder / "passwd", folder / "group"
    entry = f"{ORDINARY_USER}:*:{ORDINARY_UID}:{ORDINARY_UID}::{home}:/bin/bash\n"
    passwd.write_text(Path("/etc/passwd").read_text() + entry)
    group.write_text(Path("/etc/group").read_text() + f"{ORDINARY_USER}:x:{ORDINARY_UID}:\n")
    script = 'mount --bind "$1" /etc/passwd && mount --bind "$2" /etc/group && shift 2 && exec "$@"'
    return [
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-c",
        script,
        "sh",
        str(passwd),
        str(group),
        *command,
    ]


def _wait_until_up(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)) as probe:
            if probe.recv(4) == b"SSH-":
                return
        time.sleep(0.02)
    tail = log.read_text(errors="replace")[-1000:]
    raise RuntimeError(f"sshd does not start: {tail}. Next step: see its sshd_config, or {PACKAGES}")
