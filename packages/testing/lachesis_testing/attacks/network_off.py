"""Network: with the network off, nothing inside reaches this machine or another."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from pathlib import Path
from typing import Any

from .attack import AttackTarget, Family, Fell, Held, Verdict, mark, python
from .inside import network

network_off = Family("network")
network_off.programs(network)

CONNECT = """
import socket
family, address = {0!r}
with socket.socket(family) as sock:
    sock.settimeout(3)
    try:
        sock.connect(address)
        print(sock.recv(100).decode())
    except OSError:
        pass
"""


async def _reached(target: AttackTarget, family: socket.AddressFamily, address: Any) -> Verdict:
    """Listen on this machine, and try to connect from inside."""
    secret = f"reached {mark()}".encode()

    async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(secret)
        writer.close()

    with socket.socket(family) as listener:
        listener.bind(address)
        if family == socket.AF_INET:
            address = listener.getsockname()
        async with await asyncio.start_server(greet, sock=listener):
            code = CONNECT.format((int(family), address))
            result = await target.sandbox.exec(python(target.sandbox), stdin=code.encode(), timeout=60)
    return Fell(f"{address!r} of this machine is reached") if secret in result.stdout else Held()


@network_off.attack("loopback of the host", "connect to a port of this machine's loopback address")
async def loopback(target: AttackTarget) -> Verdict:
    return await _reached(target, socket.AF_INET, ("127.0.0.1", 0))


@network_off.attack("abstract socket of the host", "connect to an abstract socket of this machine")
async def abstract_socket(target: AttackTarget) -> Verdict:
    return await _reached(target, socket.AF_UNIX, f"\0lachesis-attack-{mark()}")


@network_off.attack("socket file of the host", "connect to a socket in a folder of this machine")
async def socket_file(target: AttackTarget) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        return await _reached(target, socket.AF_UNIX, str(Path(folder, "s")))
