"""What a far machine runs first: the hub, or a relay, for servers that forward no sockets."""

from __future__ import annotations

import json
import os


def main(arguments: list[str]) -> None:
    """`MARK hub BASE` or `MARK relay SOCKET`. The mark is written first, after the output of the login shell."""
    mark, mode, argument = arguments
    if mode == "relay":
        from backends.executor.relay import relay  # alone: the other modules take longer to load

        os.write(1, mark.encode() + b"\n")
        relay(argument)
        return
    from backends.errors import BackendError

    from .hub import Hub

    try:
        hub = Hub(argument)
    except (OSError, BackendError) as error:
        os.write(1, mark.encode() + b"\n" + json.dumps({"failed": str(error)}).encode() + b"\n")
        return
    os.write(1, mark.encode() + b"\n" + b'{"failed": ""}\n')
    hub.run()
