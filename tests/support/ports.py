"""Ports for servers that must know theirs in advance, or return to it."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_port() -> int:
    """A TCP port of loopback on which nobody listens, and that the kernel does not assign.

    A port that was bound as port 0 and closed may belong to another connection by the time a server asks for it.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(min(10_000, first // 2), first)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:  # in use
                continue
        return port
