"""Neighbours: a signal from one sandbox to another. `send_X` keeps it up until it is killed, `see_X` looks for it.

A `see` function raises `WallFell` when it sees the signal. `MARK` is a random number that both know.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import time

from lachesis_testing.attacks.inside.harness import NothingToAttack, WallFell, libc, syscall

MARK = 0
KNOWN = (sys.executable, os.__file__, "/bin/bash", "/usr/bin/env", "/etc/passwd", "/etc/hosts", "/etc/resolv.conf")
EACH = 20
"""Files that are tried of each mount."""
libc.shmat.restype = ctypes.c_void_p


def shared() -> list[str]:
    """Files that two sandboxes may have in common: of every mount that is not in memory, some."""
    found = {os.path.realpath(path) for path in KNOWN}
    with open("/proc/self/mountinfo") as file:
        mounts = [line.partition(" - ") for line in file]
    for before, _, after in mounts:
        if after.split()[0] not in ("tmpfs", "proc", "sysfs", "devpts", "cgroup", "cgroup2", "mqueue"):
            files: list[str] = []
            for root, _, names in os.walk(before.split()[4]):
                files += [os.path.join(root, name) for name in names[: EACH - len(files)]]
                if len(files) >= EACH:
                    break
            found.update(path for path in files if os.path.isfile(path) and not os.path.islink(path))
    return sorted(found)


def files() -> list[int]:
    opened = []
    for path in shared():
        try:
            opened.append(os.open(path, os.O_RDONLY))
        except OSError:
            pass
    return opened


def send_lock() -> None:
    """lock files that both can read (flock)"""
    for fd in files():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pass


def see_lock() -> None:
    for fd in files():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WallFell("%s is locked by the other" % os.readlink("/proc/self/fd/%d" % fd)) from None


def send_record_lock() -> None:
    """lock records of files that both can read (fcntl)"""
    for fd in files():
        fcntl.fcntl(fd, 37, struct.pack("hhqqixxxx", fcntl.F_RDLCK, 0, 0, 0, 0))  # F_OFD_SETLK


def see_record_lock() -> None:
    for fd in files():
        held = fcntl.fcntl(fd, 36, struct.pack("hhqqixxxx", fcntl.F_WRLCK, 0, 0, 0, 0))  # F_OFD_GETLK
        if struct.unpack_from("h", held)[0] != fcntl.F_UNLCK:
            raise WallFell("a record of %s is locked by the other" % os.readlink("/proc/self/fd/%d" % fd))


def send_opening() -> None:
    """open files that both can read, where the other watches them (inotify)"""
    end = time.monotonic() + 8
    while time.monotonic() < end:
        for fd in files():
            os.close(fd)
        time.sleep(0.05)


def see_opening() -> None:
    watch = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
    if watch < 0:
        raise NothingToAttack("inotify cannot be used")
    names = {}
    for path in shared():
        names[libc.inotify_add_watch(watch, os.fsencode(path), 0x20)] = path  # IN_OPEN
    time.sleep(0.3)
    try:
        event = os.read(watch, 4096)
    except BlockingIOError:
        return
    raise WallFell("the other opens " + names[struct.unpack_from("i", event)[0]])


def send_lease() -> None:
    """take leases of files that both can read, which hold up those who write them"""
    taken = []
    for fd in files():
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            taken.append(fd)
        except OSError:
            pass


def see_lease() -> None:
    for fd in files():
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except OSError:
            continue
        private = os.statvfs(fd).f_flag & os.ST_RDONLY == 0
        if not private:
            raise WallFell("a lease of %s can be taken" % os.readlink("/proc/self/fd/%d" % fd))


def send_abstract_socket() -> None:
    """listen on an abstract socket"""
    _keep(socket.socket(socket.AF_UNIX)).bind("\0lachesis-attack-%d" % MARK)


def see_abstract_socket() -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        try:
            sock.bind("\0lachesis-attack-%d" % MARK)
        except OSError:
            raise WallFell("the name of the other's socket is taken") from None


def send_loopback() -> None:
    """listen on a port of the loopback address"""
    _keep(socket.create_server(("127.0.0.1", 20000 + MARK % 10000)))


def see_loopback() -> None:
    with socket.create_connection(("127.0.0.1", 20000 + MARK % 10000), 2):
        raise WallFell("connected to the other's port")


def send_vsock() -> None:
    """listen on an AF_VSOCK port"""
    sock = _keep(socket.socket(40, socket.SOCK_STREAM))
    sock.bind((0xFFFFFFFF, 20000 + MARK % 10000))
    sock.listen()


def see_vsock() -> None:
    with socket.socket(40, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((0xFFFFFFFF, 20000 + MARK % 10000))
        except OSError as error:
            if error.errno == 98:  # EADDRINUSE
                raise WallFell("the other's port is taken") from None
            raise


def send_shared_memory() -> None:
    """share memory, a semaphore and a queue of messages by a number (System V)"""
    for call, arguments in ((libc.shmget, (4096,)), (libc.semget, (1,)), (libc.msgget, ())):
        call(MARK, *arguments, 0o1666)
    time.sleep(8)
    libc.shmctl(libc.shmget(MARK, 0, 0), 0, None)
    libc.semctl(libc.semget(MARK, 0, 0), 0, 0)
    libc.msgctl(libc.msgget(MARK, 0), 0, None)


def see_shared_memory() -> None:
    for name, got in (
        ("memory", libc.shmget(MARK, 0, 0)),
        ("semaphore", libc.semget(MARK, 0, 0)),
        ("queue", libc.msgget(MARK, 0)),
    ):
        if got >= 0:
            raise WallFell("the other's %s is there" % name)


def send_named_memory() -> None:
    """share a file in /dev/shm or /tmp, and a POSIX queue of messages"""
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run", "/.lachesis", "/run/lachesis-link"):
        try:
            open("%s/lachesis-attack-%d" % (folder, MARK), "w").close()
        except OSError:
            pass
    _librt().mq_open(b"/lachesis-attack-%d" % MARK, os.O_CREAT | os.O_RDWR, 0o666, None)


def see_named_memory() -> None:
    for folder in ("/dev/shm", "/tmp", "/var/tmp", "/run", "/.lachesis", "/run/lachesis-link"):
        if os.path.exists("%s/lachesis-attack-%d" % (folder, MARK)):
            raise WallFell("the other's file is in " + folder)
    if _librt().mq_open(b"/lachesis-attack-%d" % MARK, os.O_RDONLY) >= 0:
        raise WallFell("the other's queue of messages is there")


def send_key() -> None:
    """share a key of the user's keyring"""
    for ring in (-4, -5):
        try:
            syscall("add_key", b"user", b"lachesis-attack-%d" % MARK, b"x", 1, ring)
        except OSError:
            pass


def see_key() -> None:
    for ring in (-4, -5):
        try:
            syscall("keyctl", 10, ring, b"user", b"lachesis-attack-%d" % MARK, 0)  # KEYCTL_SEARCH
        except OSError:
            continue
        raise WallFell("the other's key is in the keyring of the user")


def send_process() -> None:
    """be a process that the other sees, signals or traces"""
    libc.prctl(15, b"atk%d" % (MARK % 10**11), 0, 0, 0)  # PR_SET_NAME


def see_process() -> None:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/%s/comm" % pid) as file:
                if file.read().strip() == "atk%d" % (MARK % 10**11):
                    raise WallFell("the other's process is %s here" % pid)
        except OSError:
            pass


_kept: list[socket.socket] = []


def _keep(sock: socket.socket) -> socket.socket:
    _kept.append(sock)
    return sock


def _librt() -> ctypes.CDLL:
    if hasattr(libc, "mq_open"):
        return libc
    try:
        return ctypes.CDLL("librt.so.1")
    except OSError:
        raise NothingToAttack("no librt inside") from None
