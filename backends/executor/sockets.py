"""The Unix sockets by which the owner reaches the executor."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def connection_maker(path: str) -> Callable[[], int]:
    import socket

    def connect() -> int:
        with socket.socket(socket.AF_UNIX) as stream:
            stream.setblocking(False)
            stream.connect(path)
            return stream.detach()

    return connect


def listener(address: str) -> tuple[int, Callable[[], int]]:
    """The descriptor of a listening socket, and a function that accepts a connection."""
    import socket

    if address.startswith("fd:"):
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, int(address[3:]))
        server.set_inheritable(False)
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind("\0" + address[1:] if address.startswith("@") else address)
    server.listen(128)
    server.setblocking(False)

    def accept() -> int:
        return server.accept()[0].detach()

    return server.fileno(), accept
