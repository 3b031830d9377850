"""Connections that programs inside make to a listening socket, carried to the owner as byte streams.

Each connection is a transfer that is pulled and pushed at once. The owner asks for every part, so neither side holds
more than one part a request.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from collections import deque
from typing import TYPE_CHECKING

from .framing import failure
from .transfers import OpenTransfer

if TYPE_CHECKING:
    from typing import Any

    from .services import Services

CONNECTIONS = 256
"""Connections at once to one listening socket. More are reset."""
CARRIED = 1 << 16
"""Bytes of a part."""
ACCEPTED = 64
"""Connections that are accepted before other descriptors get their turn."""


class Listener(OpenTransfer):
    """A socket on a free port of the sandbox's loopback address."""

    has_files = False

    def __init__(self, services: Services) -> None:
        super().__init__(services, "")
        import socket  # here, as loading it takes time

        self.no_delay = (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.reset = (socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            self.socket.bind(("127.0.0.1", 0))
            self.socket.listen(4096)
        except OSError:
            self.socket.close()
            raise
        self.socket.setblocking(False)
        self.port: int = self.socket.getsockname()[1]
        self.arrived: deque[Any] = deque()
        self.waiting: deque[tuple[int, Connected]] = deque()
        """Requests for a connection."""
        self.carried: set[Connected] = set()
        self.refused = 0
        self.loop.watch(self.socket.fileno(), select.EPOLLIN, self.on_readable)

    def on_readable(self, fd: int) -> None:
        try:
            for _ in range(ACCEPTED):
                connection = self.socket.accept()[0]
                if len(self.arrived) + len(self.carried) >= CONNECTIONS:
                    connection.setsockopt(*self.reset)
                    connection.close()
                    self.refused += 1
                else:
                    connection.setsockopt(*self.no_delay)
                    self.arrived.append(connection)
        except (BlockingIOError, ConnectionAbortedError):
            pass
        except OSError:  # no descriptors are left, and epoll would report it again at once
            self.loop.unwatch(fd)
            self.loop.after(0.1, self.go_on)
        self.hand_over()

    def go_on(self) -> None:
        if self.socket.fileno() >= 0:
            self.loop.watch(self.socket.fileno(), select.EPOLLIN, self.on_readable)

    def accept(self, request: int, transfer: Connected) -> None:
        self.waiting.append((request, transfer))
        self.hand_over()

    def hand_over(self) -> None:
        while self.arrived and self.waiting:
            request, transfer = self.waiting.popleft()
            transfer.begin(self.arrived.popleft())
            self.carried.add(transfer)
            self.session.send({"id": request, "refused": self.refused})

    def drop(self) -> None:
        if self.socket.fileno() >= 0:
            self.loop.unwatch(self.socket.fileno())
            # A shell that is being started has a copy of the descriptor until it is bash: it would go on listening.
            self.socket.shutdown(2)  # SHUT_RDWR
            self.socket.close()
        for connection in self.arrived:
            connection.setsockopt(*self.reset)
            connection.close()
        self.arrived.clear()
        for request, _ in self.waiting:
            self.session.send(failure(request, OSError(errno.EBADF, "the socket is closed")))
        self.waiting.clear()
        for transfer in list(self.carried):
            transfer.drop()


class Connected(OpenTransfer):
    """One connection, or the wait for it. `commit` ends its outgoing half."""

    has_files = False

    def __init__(self, services: Services, listener: Listener) -> None:
        super().__init__(services, "")
        self.listener = listener
        self.socket: Any = None
        self.pulls: deque[int] = deque()
        self.pushes: deque[tuple[int, memoryview | None]] = deque()
        self.ended = False

    def begin(self, connection: Any) -> None:
        connection.setblocking(False)
        self.socket = connection

    def pull(self, request: int) -> None:
        self.pulls.append(request)
        self.move()

    def push(self, request: int, data: bytes) -> None:
        self.pushes.append((request, memoryview(data)))
        self.move()

    def commit(self, request: int) -> None:
        self.pushes.append((request, None))
        self.move()

    def move(self, fd: int = -1) -> None:
        """Move what can be moved now, and watch the connection for the rest."""
        if self.socket is None:
            raise OSError(errno.ENOTCONN, "there is no connection yet")
        if self.socket.fileno() < 0:
            self.fail(OSError(errno.EBADF, "the connection is closed"))
            return
        try:
            self.read()
            self.write()
        except OSError as error:
            self.fail(error)
        events = (select.EPOLLIN if self.pulls else 0) | (select.EPOLLOUT if self.pushes else 0)
        if events:
            self.loop.watch(self.socket.fileno(), events, self.move)
        else:  # epoll reports errors also where no event is wanted
            self.loop.unwatch(self.socket.fileno())

    def read(self) -> None:
        while self.pulls:
            try:
                data = os.read(self.socket.fileno(), CARRIED)
            except BlockingIOError:
                return
            self.session.send({"id": self.pulls.popleft(), "end": not data}, data)

    def write(self) -> None:
        while self.pushes:
            request, data = self.pushes[0]
            if data is None:
                self.socket.shutdown(1)
                self.ended = True
            elif data:
                try:
                    self.pushes[0] = (request, data[os.write(self.socket.fileno(), data) :])
                except BlockingIOError:
                    return
                continue
            self.pushes.popleft()
            self.session.send({"id": request})

    def fail(self, error: OSError) -> None:
        requests = [*self.pulls, *(request for request, _ in self.pushes)]
        self.pulls.clear()
        self.pushes.clear()
        for request in requests:
            self.session.send(failure(request, error))

    def drop(self) -> None:
        """Close it. A connection whose outgoing half was not ended is reset: what it has received is not complete."""
        self.listener.waiting = deque(wait for wait in self.listener.waiting if wait[1] is not self)
        self.listener.carried.discard(self)
        if self.socket is not None and self.socket.fileno() >= 0:
            self.loop.unwatch(self.socket.fileno())
            if not self.ended:
                self.socket.setsockopt(*self.listener.reset)
            self.socket.close()
