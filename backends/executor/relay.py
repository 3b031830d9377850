"""The relay: it copies a byte stream to and from a Unix socket."""

from __future__ import annotations

import contextlib
import os
import select

from .framing import CHUNK
from .kernel import PR_SET_DUMPABLE, libc


def relay(address: str) -> None:
    """Copy standard input to the Unix socket `address` and what comes from there to standard output."""
    import socket

    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(address)
        other.setblocking(False)
        routes = [(0, other.fileno()), (other.fileno(), 1)]
        for fd in (0, 1):
            os.set_blocking(fd, False)
        waiting = {source: b"" for source, _ in routes}
        poll = select.poll()
        while True:
            for fd in {0, 1, other.fileno()}:
                events = sum(select.POLLIN for source, _ in routes if source == fd and not waiting[source])
                events |= sum(select.POLLOUT for source, target in routes if target == fd and waiting[source])
                if events:
                    poll.register(fd, events)
                else:  # a closed descriptor would be reported in every round
                    with contextlib.suppress(KeyError):
                        poll.unregister(fd)
            ready = dict(poll.poll())
            for source, target in routes:
                if not waiting[source] and ready.get(source, 0) & ~select.POLLOUT:
                    with contextlib.suppress(BlockingIOError):
                        waiting[source] = os.read(source, CHUNK)
                        if not waiting[source]:
                            return
                if waiting[source]:
                    with contextlib.suppress(BlockingIOError):
                        waiting[source] = waiting[source][os.write(target, waiting[source]) :]
            if ready.get(1, 0) & (select.POLLERR | select.POLLHUP):
                return
