"""Secrets: finding what was planted outside. `search(mark)` returns the places at which it is seen inside."""

from __future__ import annotations

import ctypes
import json  # noqa: F401
import os
import socket

from lachesis_testing.attacks.inside.harness import libc, syscall

SKIPPED = ("/sys", "/usr", "/.lachesis")


def search(mark: str, sockets: list[str]) -> list[str]:
    """Search variables, command lines, files, links, names, descriptors, sockets, keyrings, shared memory."""
    wanted = mark.encode()
    found = ["the variables"] if wanted in repr(dict(os.environ)).encode() else []
    for root, folders, files in os.walk("/"):
        if root == "/proc":
            files, folders[:] = [], [name for name in folders if name.isdigit()]
        elif root.startswith("/proc/"):
            files, folders[:] = ["environ", "cmdline", "mountinfo", "comm"], []
        elif root in SKIPPED or "/lib/python3" in root:
            folders[:] = []
            continue
        for name in files + folders:
            path = os.path.join(root, name)
            if wanted in os.fsencode(path) or wanted in _content(path):
                found.append(path)
    for number in os.listdir("/proc/self/fd"):
        path = "/proc/self/fd/" + number
        if wanted in _content(path):
            found.append(path)
    for name in sockets:  # knowing the name does not make it reachable
        for address in (name, "\0" + name):
            try:
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.settimeout(5)
                    sock.connect(address)
                    found.append("the socket " + name)
            except (OSError, ValueError):
                pass
    for ring in (-1, -2, -3, -4, -5):  # of the thread, the process, the session, the user, the user's session
        try:
            key = syscall("keyctl", 10, ring, b"user", mark.encode(), 0)
            buffer = ctypes.create_string_buffer(200)
            if syscall("keyctl", 11, key, buffer, 200) > 0:
                found.append("keyring %d" % ring)
        except OSError:
            pass
    libc.shmat.restype = ctypes.c_void_p
    for segment in range(64):
        where = libc.shmat(segment, None, 0o10000)
        if where not in (None, ctypes.c_void_p(-1).value) and wanted in ctypes.string_at(where, 64):
            found.append("shared memory %d" % segment)
    return found


def _content(path: str) -> bytes:
    try:
        if os.path.islink(path):
            data = os.fsencode(os.readlink(path))
            if not path.startswith("/proc/self/fd/") or not data.startswith(b"/"):
                return data
        if not os.path.isfile(path) or os.path.getsize(path) > 1 << 20:
            return b""
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""
