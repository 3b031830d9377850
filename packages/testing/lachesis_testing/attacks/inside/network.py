"""Network: with the network off, no family of sockets leads anywhere."""

from __future__ import annotations

import os
import socket
import struct

from lachesis_testing.attacks.inside.harness import NothingToAttack, WallFell

ORDINARY = {0, 1, 2, 10, 16}
"""AF_UNSPEC, and the families that programs need: unix, inet, inet6, netlink."""
NAMES = {3: "ax25", 8: "bridge", 15: "key", 17: "packet", 21: "rds", 29: "can", 30: "tipc", 31: "bluetooth"}
NAMES.update({33: "rxrpc", 36: "ieee802154", 37: "caif", 38: "alg", 39: "nfc", 40: "vsock", 41: "kcm", 43: "smc"})
NAMES.update({44: "xdp", 45: "mctp"})


def vsock() -> None:
    """make a socket to the hypervisor and to other sandboxes (AF_VSOCK)"""
    with socket.socket(40, socket.SOCK_STREAM) as sock:
        sock.bind((0xFFFFFFFF, 0xFFFFFFFF))
        raise WallFell("AF_VSOCK is bound")


def other_families() -> None:
    """make sockets of every family but unix, inet, inet6 and netlink"""
    made = []
    for family in range(46):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
            if family not in ORDINARY:
                try:
                    socket.socket(family, kind).close()
                    made.append(NAMES.get(family, str(family)))
                except OSError:
                    pass
    if made:
        raise WallFell("sockets of " + ", ".join(dict.fromkeys(made)))


def other_protocols() -> None:
    """make sockets of transports that programs do not need (DCCP, L2TP, SCTP, UDP-Lite, SMC, MPTCP)"""
    made = []
    for protocol in (33, 115, 132, 136, 256, 262):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, 6):
            try:
                socket.socket(socket.AF_INET, kind, protocol).close()
                made.append(str(protocol))
            except OSError:
                pass
    if made:
        raise WallFell("protocols " + " ".join(made))


def raw_sockets() -> None:
    """make raw sockets of inet and inet6"""
    for family, protocol in ((socket.AF_INET, 1), (socket.AF_INET6, 58)):
        try:
            socket.socket(family, socket.SOCK_RAW, protocol).close()
        except OSError:
            continue
        raise WallFell("a raw socket")


def netlink() -> None:
    """talk to the kernel by netlink beyond routes (audit, connector, netfilter, uevents...)"""
    made = []
    for protocol in range(1, 23):
        try:
            socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol).close()
            made.append(str(protocol))
        except OSError:
            pass
    if made:
        raise WallFell("netlink protocols " + " ".join(made))


def interfaces() -> None:
    """find a network interface or a route besides the loopback"""
    names = [name for _, name in socket.if_nameindex() if name != "lo"]
    up = []
    for name in names:
        try:
            with open("/sys/class/net/%s/operstate" % name) as file:
                up.append(name if file.read().strip() != "down" else "")
        except OSError:
            up.append("")
    with open("/proc/net/route") as file:
        routes = [line.split()[0] for line in file.readlines()[1:]]
    if routes or any(up):
        raise WallFell("interfaces and routes: " + " ".join(filter(None, up + routes)))


def outside_addresses() -> None:
    """reach the metadata address of clouds, the container engine's bridge and a public address"""
    for host, port in (("169.254.169.254", 80), ("172.17.0.1", 2375), ("1.1.1.1", 53), ("8.8.8.8", 443)):
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_INET, kind) as sock:
                sock.settimeout(1)
                try:
                    sock.connect((host, port))
                except OSError:
                    continue
                raise WallFell("%s port %d by %s" % (host, port, "TCP" if kind == socket.SOCK_STREAM else "UDP"))


def interface_changes() -> None:
    """bring up a tunnel or another interface (TUNSETIFF, netlink)"""
    import fcntl

    try:
        fd = os.open("/dev/net/tun", os.O_RDWR)
        fcntl.ioctl(fd, 0x400454CA, struct.pack("16sH", b"lachesis%d", 0x1001))
        raise WallFell("a tunnel was made")
    except OSError:
        pass
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    # RTM_NEWLINK, NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL: a dummy with a name of its own
    info = struct.pack("HH", 9, 1) + b"dummy\0\0\0"
    link = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH", 13, 3) + b"lachesis0\0\0\0"
    link += struct.pack("HH", 4 + len(info), 18) + info
    sock.send(struct.pack("IHHII", 16 + len(link), 16, 0x1 | 0x4 | 0x200 | 0x400, 1, 0) + link)
    error = struct.unpack_from("i", sock.recv(4096), 16)[0]
    if error == 0:
        raise WallFell("a network interface was made")
    if error != -1:
        raise NothingToAttack("the kernel has no such interfaces: " + os.strerror(-error))
