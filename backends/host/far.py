"""What a far machine runs first: the hub, or a relay, which needs none of the other modules."""

from __future__ import annotations

import json
import os
import select
import socket


def relay(path: str) -> None:
    """Copy standard input and output to and from the socket `path`, for servers that forward no sockets."""
    stream = socket.socket(socket.AF_UNIX)
    stream.connect(path)
    while True:
        for fd in select.select([0, stream.fileno()], [], [])[0]:
            if fd == 0:
                data = os.read(0, 1 << 18)
                if not data:
                    return
                stream.sendall(data)
            else:
                data = stream.recv(1 << 18)
                if not data:
                    return
                view = memoryview(data)
                while view:
                    view = view[os.write(1, view) :]


def main(arguments: list[str]) -> None:
    """`MARK hub BASE` or `MARK relay SOCKET`. The mark is written first, after the output of the login shell."""
    mark, mode, argument = arguments
    if mode == "relay":
        os.write(1, mark.encode() + b"\n")
        relay(argument)
        return
    from backends.base import BackendError

    from .hub import Hub

    try:
        hub = Hub(argument)
    except (OSError, BackendError) as error:
        os.write(1, mark.encode() + b"\n" + json.dumps({"failed": str(error)}).encode() + b"\n")
        return
    os.write(1, mark.encode() + b"\n" + b'{"failed": ""}\n')
    hub.run()
