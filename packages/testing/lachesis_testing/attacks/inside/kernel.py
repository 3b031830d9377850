"""Kernel surface: what a program inside can reach of the kernel beyond what ordinary programs need."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import resource
import stat
import struct
import sys
from typing import Any

from lachesis_testing.attacks.inside.harness import NothingToAttack, WallFell, libc, reached, syscall

CLONE_NEWUSER = 0x10000000


def user_namespace() -> None:
    """make a user namespace, which gives every capability inside it (unshare)"""
    syscall("unshare", CLONE_NEWUSER)
    raise WallFell("a new user namespace, with capabilities " + _status("CapEff"))


def user_namespace_by_clone() -> None:
    """make a user namespace with a new process (clone)"""
    sigchld = 17
    pid = syscall("clone", CLONE_NEWUSER | sigchld, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    raise WallFell("a process in a new user namespace")


def user_namespace_by_clone3() -> None:
    """make a user namespace by a call whose arguments no filter can read (clone3)"""
    pid = syscall("clone3", struct.pack("8Q", CLONE_NEWUSER, 0, 0, 0, 17, 0, 0, 0), 64)
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    raise WallFell("a process in a new user namespace")


def other_namespaces() -> None:
    """make mount, network, PID, IPC, UTS, cgroup and time namespaces"""
    kinds = {"mount": 0x20000, "network": 0x40000000, "PID": 0x20000000, "IPC": 0x8000000, "UTS": 0x4000000}
    kinds.update({"cgroup": 0x2000000, "time": 0x80})
    made = []
    for name, flag in kinds.items():
        try:
            syscall("unshare", flag)
            made.append(name)
        except OSError:
            pass
    if made:
        raise WallFell("new namespaces: " + ", ".join(made))


def setns() -> None:
    """enter the namespaces of PID 1, and its own again (setns)"""
    entered = []
    for process in ("1", "self"):
        for kind in ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup"):
            try:
                fd = os.open("/proc/%s/ns/%s" % (process, kind), os.O_RDONLY)
                syscall("setns", fd, 0)
                entered.append("%s of %s" % (kind, process))
            except OSError:
                pass
    if entered:
        raise WallFell("entered " + ", ".join(entered))
    reached("setns", -1, 0)


def keyrings() -> None:
    """put a key into a keyring (add_key, keyctl)"""
    key = syscall("add_key", b"user", b"lachesis-attack", b"x", 1, -2)  # the keyring of this process
    raise WallFell("key %d was added" % key)


def io_uring() -> None:
    """make an io_uring"""
    fd = syscall("io_uring_setup", 1, ctypes.create_string_buffer(120))
    raise WallFell("io_uring with descriptor %d" % fd)


def userfaultfd() -> None:
    """handle page faults (userfaultfd), also those of the kernel"""
    for flags in (0, 1):  # 1: UFFD_USER_MODE_ONLY
        try:
            syscall("userfaultfd", flags | os.O_CLOEXEC)
        except OSError:
            continue
        raise WallFell("userfaultfd" + (" for user mode" if flags else " for faults of the kernel"))


def bpf() -> None:
    """make a BPF map"""
    syscall("bpf", 0, ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 4, 1) + bytes(112)), 128)
    raise WallFell("a BPF map")


def perf_events() -> None:
    """count an event of its own process (perf_event_open)"""
    attributes = bytearray(112)
    struct.pack_into("IIQ", attributes, 0, 1, 112, 9)  # PERF_TYPE_SOFTWARE, PERF_COUNT_SW_DUMMY
    struct.pack_into("Q", attributes, 40, 1 << 5 | 1 << 6)  # exclude_kernel, exclude_hv
    syscall("perf_event_open", (ctypes.c_char * 112).from_buffer(attributes), 0, -1, -1, 0)
    raise WallFell("an event is counted")


def fanotify() -> None:
    """watch files with fanotify"""
    for flags in (0, 0x200):  # FAN_REPORT_FID, which needs no privilege
        try:
            syscall("fanotify_init", flags, os.O_RDONLY)
        except OSError:
            continue
        raise WallFell("a fanotify group")


def file_handles() -> None:
    """open a file by its handle, past every mount (open_by_handle_at)"""
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    where = ctypes.c_int()
    try:
        syscall("name_to_handle_at", -100, b"/proc/self/exe", handle, ctypes.byref(where), 0x400)
    except OSError:
        struct.pack_into("Ii", handle, 0, 8, 1)
    root = os.open("/", os.O_RDONLY)
    reached("open_by_handle_at", root, handle, os.O_RDONLY)


def modules() -> None:
    """load a kernel module"""
    try:
        reached("init_module", None, 0, b"")
    except OSError:
        reached("finit_module", -1, b"", 0)


def kexec() -> None:
    """load another kernel"""
    reached("kexec_load", 0, 0, None, 0xFFFF)


def mounts() -> None:
    """mount, clone a mount, open a file system, change the root"""
    done = []
    if libc.mount(b"none", b"/", b"no-such-file-system", 0, None) == 0 or ctypes.get_errno() != 1:
        done.append("mount (%s)" % os.strerror(ctypes.get_errno()))
    for name, arguments in {"fsopen": (b"tmpfs", 0), "open_tree": (-100, b"/", 1)}.items():
        try:
            syscall(name, *arguments)
            done.append(name)
        except OSError:
            pass
    try:
        os.chroot("/")
        done.append("chroot")
    except OSError:
        pass
    if done:
        raise WallFell("let through: " + ", ".join(done))


def devices() -> None:
    """make a device file, and open the memory, the kernel's log and the disks of the machine"""
    disks = os.listdir("/sys/block") if os.path.isdir("/sys/block") else ["sda", "vda", "nvme0n1"]
    for name in ["mem", "kmem", "port", "kmsg", "fuse", "kvm", *disks]:
        try:
            os.open("/dev/" + name, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue
        raise WallFell("/dev/%s opens" % name)
    for path in ("/proc/kcore", "/proc/kmsg"):
        try:
            os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 1)
        except OSError:
            continue
        raise WallFell("%s can be read" % path)
    path = "/tmp/lachesis-attack-%d" % os.getpid()
    os.mknod(path, 0o600 | stat.S_IFBLK, os.makedev(8, 0))
    os.unlink(path)
    raise WallFell("a block device was made")


def settings() -> None:
    """open for writing every setting of the kernel (/proc/sys, /proc/sysrq-trigger, /proc/irq, /sys)"""
    opened = []
    paths = ["/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/timer_list", "/proc/acpi"]
    for top in ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/sys"):
        for root, _, files in os.walk(top):
            paths += [os.path.join(root, name) for name in files]
    for path in paths:
        try:
            if stat.S_ISREG(os.stat(path).st_mode):  # else it is covered by a device
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                opened.append(path)
        except OSError:
            pass
    if opened:
        raise WallFell("%d can be written: %s" % (len(opened), " ".join(opened[:5])))


def rare_calls() -> None:
    """use calls that programs do not need (syslog, swapon, quotactl, kcmp, modify_ldt, personality...)"""
    calls: dict[str, tuple[Any, ...]] = {"syslog": (3, ctypes.create_string_buffer(64), 64), "swapon": (b"/x", 0)}
    calls.update({"quotactl": (0x80000700, None, 0, None), "kcmp": (os.getpid(), os.getpid(), 1, 0, 0)})
    calls.update({"personality": (0x400000,), "request_key": (b"user", b"lachesis-attack", None, -2)})
    calls["settimeofday"] = (None, None)
    if os.uname().machine == "x86_64":
        calls["modify_ldt"] = (0, ctypes.create_string_buffer(64), 64)
    through = []
    for name, arguments in calls.items():
        try:
            reached(name, *arguments)
        except WallFell as found:
            through.append(str(found))
        except OSError:
            pass
    if through:
        raise WallFell("; ".join(through))


def terminal_injection() -> None:
    """type into a terminal (TIOCSTI), and change its line discipline"""
    os.setsid()
    _, terminal = os.openpty()
    fcntl.ioctl(terminal, 0x540E, 0)  # TIOCSCTTY
    for name, request, value in (("TIOCSTI", 0x5412, b"x"), ("TIOCSETD", 0x5423, struct.pack("i", 3))):
        try:
            fcntl.ioctl(terminal, request, value)
        except OSError as error:
            if error.errno in (errno.EPERM, errno.EIO):
                continue
            raise WallFell("%s is let through (%s)" % (name, error.strerror)) from None
        raise WallFell(name + " works")


def page_cache() -> None:
    """ask which pages of shared files others have read (mincore, cachestat, preadv2, directory notices)"""
    found = []
    path = os.path.realpath(sys.executable)
    fd = os.open(path, os.O_RDONLY)
    libc.mmap.restype = ctypes.c_void_p
    where = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0)))
    buffer = ctypes.create_string_buffer(4096)
    calls: dict[str, tuple[Any, ...]] = {"mincore": (where, 4096, buffer)}
    calls["cachestat"] = (fd, struct.pack("QQ", 0, 4096), buffer, 0)
    for name, arguments in calls.items():
        try:
            syscall(name, *arguments)
            found.append(name)
        except OSError:
            pass
    try:
        os.preadv(fd, [bytearray(16)], 0, 8)  # RWF_NOWAIT
        found.append("preadv2 without waiting")
    except OSError:
        pass
    try:
        fcntl.fcntl(os.open(os.path.dirname(path), os.O_RDONLY), 1026, 1)  # F_NOTIFY
        found.append("directory notices")
    except OSError:
        pass
    if found:
        raise WallFell("let through: " + ", ".join(found))


def capabilities() -> None:
    """have a capability, or get one from a setuid program"""
    for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
        if int(_status(name), 16):
            raise WallFell("%s is %s" % (name, _status(name)))
    if _status("NoNewPrivs") != "1":
        raise WallFell("setuid programs give privileges: no_new_privs is not set")


def foreign_system_calls() -> None:
    """make system calls with the numbers of other ABIs (32 bit, x32), past a filter that knows one"""
    if os.uname().machine != "x86_64":
        raise NothingToAttack("x86_64 only")
    getpid = 39
    if libc.syscall(ctypes.c_long(0x40000000 + getpid)) > 0:
        raise WallFell("x32 calls are let through")
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("53 b814000000 cd80 5b c3"))  # push ebx; eax = getpid; int 0x80; pop; ret
    call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    if call() > 0:
        raise WallFell("32-bit calls are let through")


def core_dumps() -> None:
    """have the machine's handler of core dumps started, which runs outside and as root"""
    if sys.platform != "linux" or not open("/proc/sys/kernel/core_pattern").read().startswith("|"):
        raise NothingToAttack("core dumps are files here, and bounded to none")
    for limit in (None, (0, 0), (0, 1)):
        if limit is not None:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_CORE, limit)
        if resource.getrlimit(resource.RLIMIT_CORE)[0] != 1:  # core(5): of all limits, only 1 keeps it from starting
            raise WallFell("a crash starts the program of core_pattern")


def _status(name: str) -> str:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return line.split()[1]
    raise NothingToAttack("the kernel does not show " + name)
