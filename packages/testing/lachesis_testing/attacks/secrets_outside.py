"""Secrets of this machine: planted in their usual places, and those that are there anyway."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from backends import SandboxSpec

from .attack import AttackTarget, Family, Fell, Held, Verdict, mark, run_inside
from .inside import secrets
from .inside.harness import NUMBERS

secrets_outside = Family("secrets")

SEALED = ["/etc/shadow", "/etc/gshadow", "/etc/ssh/ssh_host_ed25519_key", "/etc/ssh/ssh_host_rsa_key", "/etc/sudoers"]
"""Files for root alone."""
ENGINES = ["/var/run/docker.sock", "/run/docker.sock", "/run/podman/podman.sock", "/run/containerd/containerd.sock"]


@contextlib.contextmanager
def planted(secret: str, home: Path | None = None) -> Iterator[list[str]]:
    """Secrets in variables, files, command lines, descriptors, sockets and a keyring; yields the sockets' names."""
    with contextlib.ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="lachesis-attack-")))
        places = {home or Path.home(), Path.cwd(), Path("/dev/shm"), Path(tempfile.gettempdir()), Path("/var/tmp")}
        written = []
        for place in [*places, folder]:
            with contextlib.suppress(OSError):
                path = place / f".lachesis-attack-{os.urandom(4).hex()}"
                path.write_text(f"{secret}: file")
                undo.callback(path.unlink, missing_ok=True)
                written.append(path)
        for arguments, variables in (([f"{secret}: command line"], {}), ([], {"TOKEN": f"{secret}: variable"})):
            process = subprocess.Popen(
                ["sleep", "1000", *arguments] if not arguments else ["sh", "-c", "read line", *arguments],
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
            )
            undo.callback(process.wait)
            undo.callback(process.kill)
            assert process.stdin is not None
            undo.callback(process.stdin.close)
        sockets = [str(folder / "agent"), f"{secret}-socket"]
        for address in (sockets[0], f"\0{sockets[1]}"):
            listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(address)
            listener.listen()
        inherited = undo.enter_context(written[0].open())
        os.set_inheritable(inherited.fileno(), True)
        libc = ctypes.CDLL(None)
        is_arm = platform.machine() == "aarch64"
        add, control = NUMBERS["add_key"][is_arm], NUMBERS["keyctl"][is_arm]
        data = f"{secret}: keyring".encode()
        key = libc.syscall(add, b"user", secret.encode(), data, len(data), -4)  # the user's keyring
        if key > 0:
            undo.callback(libc.syscall, control, 9, key, -4)  # KEYCTL_UNLINK
        yield sockets


@secrets_outside.attack("planted", "find secrets of files, variables, command lines, descriptors, sockets, keyrings")
async def planted_secrets(target: AttackTarget) -> Verdict:
    secret = f"planted{mark()}"
    with planted(secret) as sockets:
        sandbox = await target.backend.create(SandboxSpec())  # made while they are there
        try:
            names = [name[::-1] for name in (secret, *sockets)]  # its own program is not what it has to find
            code = f"names = [name[::-1] for name in {names!r}]\nprint(json.dumps(search(names[0], names[1:])))"
            ran = await run_inside(sandbox, secrets, code)
        finally:
            await sandbox.close()
    if ran.exit_code:
        raise RuntimeError(f"the search failed inside: {ran}")
    found = json.loads(ran.stdout)
    return Fell(f"seen in {', '.join(found[:5])}") if found else Held()


@secrets_outside.attack("variables", "see variables of this process")
async def own_variables(target: AttackTarget) -> Verdict:
    shown = await target.sandbox.exec("env -0; cat /proc/1/environ /proc/$PPID/environ 2> /dev/null", timeout=30)
    inside = set(shown.stdout.split(b"\0"))
    usual = {"PATH", "HOME", "LANG", "SHELL", "TERM", "USER", "LOGNAME", "PWD", "SHLVL", "_"}
    seen = [name for name, value in os.environ.items() if name not in usual and f"{name}={value}".encode() in inside]
    return Fell(f"{', '.join(sorted(seen)[:5])}") if seen else Held()


@secrets_outside.attack("files of root", f"read {', '.join(SEALED)} of this machine")
async def files_of_root(target: AttackTarget) -> Verdict:
    seen = []
    for path in SEALED:
        with contextlib.suppress(OSError):
            inside = await target.sandbox.read_bytes(path)
            outside = Path(path).read_bytes()
            if inside == outside and outside:
                seen.append(path)
    return Fell(f"{', '.join(seen)} can be read") if seen else Held()


@secrets_outside.attack("home folders", "see the home folders and the temporary files of this machine")
async def home_folders(target: AttackTarget) -> Verdict:
    name = f"lachesis-attack-{mark()}"
    places = {Path.home(), Path(tempfile.gettempdir()), Path("/dev/shm"), Path.cwd()}
    with contextlib.ExitStack() as undo:
        for place in places:
            try:
                (place / name).touch()
                undo.callback((place / name).unlink)
            except OSError:
                places.discard(place)
        listed = " ".join(f"'{place / name}'" for place in places)
        found = await target.sandbox.exec(f"ls -d {listed} 2> /dev/null", timeout=30)
    return Fell(f"{found.stdout.decode().split()} can be seen") if found.stdout else Held()


@secrets_outside.attack("sockets of engines", "reach the sockets of container engines and of the ssh agent")
async def sockets_of_engines(target: AttackTarget) -> Verdict:
    names = [*ENGINES, *filter(None, [os.environ.get("SSH_AUTH_SOCK"), os.environ.get("DOCKER_HOST", "")[7:]])]
    names += [str(Path(os.environ.get("XDG_RUNTIME_DIR", "/run/user/0"), "bus")), "/run/dbus/system_bus_socket"]
    code = (
        "import socket\n"
        f"for name in {names!r}:\n"
        "    try:\n        socket.socket(socket.AF_UNIX).connect(name)\n        print(name)\n"
        "    except OSError:\n        pass\n"
    )
    ran = await run_inside(target.sandbox, secrets, code)
    return Fell(f"{ran.stdout.decode().split()} can be connected to") if ran.stdout else Held()


@secrets_outside.attack("other processes", "see processes besides its own")
async def other_processes(target: AttackTarget) -> Verdict:
    name = mark()
    process = subprocess.Popen(["sleep", f"1{name}"])  # noqa: ASYNC220
    try:
        seen = await target.sandbox.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=30)
    finally:
        process.kill()
        process.wait()
    return Fell("a process of this machine is seen") if f"1{name}".encode() in seen.stdout else Held()
