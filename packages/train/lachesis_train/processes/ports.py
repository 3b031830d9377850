"""Ports for processes that must find each other again after a restart."""

from __future__ import annotations

import random
import socket
from pathlib import Path


def free_ports(count: int) -> list[int]:
    """Different ports of 127.0.0.1 that nothing listens at.

    They are outside the range from which the system takes ports for connections: another program would otherwise get
    one of them while the process that it belongs to starts again.
    """
    lowest = _first_ephemeral()
    candidates = random.sample(range(lowest // 2, lowest), 200)
    found: list[int] = []
    for port in candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"no {count} free ports below {lowest}")


def _first_ephemeral() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        return 32768
