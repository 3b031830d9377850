"""Ports for servers that have to know theirs beforehand, or come back to it."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A TCP port of loopback on which nobody listens, and that the kernel gives to nobody who asks for any.

    One that was bound to port 0 and closed may be the next connection's, by the time a server asks for it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(10_000, first // 2), first)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # it is somebody's
                continue
        return port
