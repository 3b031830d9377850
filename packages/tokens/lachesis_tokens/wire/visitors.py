"""Who may ask an HTTP service of this machine: the programs of its owner. No other user, and no web page.

A service on the loopback interface needs no password for that. The kernel knows which user holds the other end of a
connection, and browsers say which page asks. Programs that were written for a service without a token go on working.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from weakref import WeakSet

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Address = tuple[str, int]

_NETLINK_SOCK_DIAG: Final = 4
_REQUEST: Final = struct.Struct("=IHHII BBBxI 2s2s16s16sI8s")
"""`nlmsghdr` and `inet_diag_req_v2`; the ports are in the order of the network. Source: linux/inet_diag.h."""
_ANSWER: Final = struct.Struct("=IHHII BBBB 2s2s16s16sI8s IIIII")
"""`nlmsghdr` and `inet_diag_msg`."""
_SOCK_DIAG_BY_FAMILY: Final = 20
_LISTEN: Final = 10


class Visitors:
    """Decides about the requests to one service.

    Args:
        service: its name in messages.
        host: the address that it listens on.
        has_token: the service asks for a token or key itself. A web page cannot send it, and another user does not
            know it, so that names and users do not matter.
        others: what lets other users in, for the message that refuses them.
        open_to_users: every user of this machine may ask.
        links: pages of other sites may link to its pages. Not where a GET changes something.
    """

    def __init__(
        self,
        service: str,
        host: str,
        *,
        has_token: bool = False,
        others: str = "",
        open_to_users: bool = False,
        links: bool = False,
    ) -> None:
        self.service = service
        self.host = host
        self.others = others
        self.links = links
        self._by_name = is_loopback(host) and not has_token
        # Other systems do not tell whose a connection is.
        self._by_user = self._by_name and not open_to_users and sys.platform == "linux"
        self._owners = {0, os.getuid(), os.geteuid()}
        self._known: WeakSet[Any] = WeakSet()
        """Connections of theirs: the kernel is asked once for each."""

    def refusal(self, request: web.BaseRequest) -> str | None:
        """Why a request is not answered; None if it is. The status is 403."""
        if self._is_of_a_page(request):
            return f"pages of other sites may not use {self.service}"
        if self._by_name and not is_loopback(_name(request)):
            # A page whose name was made to lead here is of the same origin for the browser.
            return f"{self.service} listens on {self.host} only and is not {request.host[:200]!r}; use that address"
        if self._by_user and request.transport not in self._known:
            if (user := peer_user(request.transport)) in self._owners:
                self._known.add(request.transport)
                return None
            whose = "of a user who cannot be told" if user is None else f"of user {user}"
            way = f"; to let others ask, {self.others}" if self.others else ""
            return f"{self.service} answers its owner only, and this connection is {whose}{way}"
        return None

    def middleware(self, refused: Callable[[str], web.StreamResponse]) -> Any:
        """The check before every route. `refused` makes the answer, as the clients of the service read it."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            reason = self.refusal(request)
            return await handler(request) if reason is None else refused(reason)

        return guard

    def _is_of_a_page(self, request: web.BaseRequest) -> bool:
        headers = request.headers
        if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            followed = headers.get("Sec-Fetch-Mode") == "navigate" and headers.get("Sec-Fetch-Dest") == "document"
            return not (self.links and followed and request.method == "GET")
        # Other ports of this machine are other origins, and may be those of other users. Of a picture or a link, old
        # browsers say by Referer alone which page it is on, and not which of the two it is.
        origins = [*headers.getall("Origin", ()), *(() if self.links else headers.getall("Referer", ()))]
        return any(_netloc(origin) != request.host.lower() for origin in origins)


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc.lower() or None
    except ValueError:
        return None


def _name(request: web.BaseRequest) -> str:
    """The name in the header Host; empty where it is none."""
    host = ",".join(request.headers.getall("Host", ()))
    try:
        split = urlsplit(f"//{host}")
        valid = split.netloc == host and "@" not in host and split.port != 0
        return (split.hostname or "") if valid else ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether only this machine is reached at the address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


# The user at the other end of a connection.


def peer_user(transport: Any) -> int | None:
    """The id of the user who made the other end of a TCP connection on this machine.

    None where there is no such socket any more: who asks and closes at once is nobody. The kernel counts a closed
    socket as root's.
    """
    if transport is None or not (here := transport.get_extra_info("sockname")):
        return None
    there = transport.get_extra_info("peername")
    if not there:
        return None
    try:
        return user_by_netlink(there[:2], here[:2])
    except OSError:  # a kernel without it, or a sandbox that has no netlink
        return user_by_table(there[:2], here[:2])


def user_by_netlink(local: Address, remote: Address) -> int | None:
    """Whose the socket with these two ends is. Asks for this one, however many there are.

    Raises:
        OSError: the kernel does not answer such questions.
    """
    family = socket.AF_INET6 if ":" in local[0] else socket.AF_INET
    ends = (*(struct.pack("!H", port) for _, port in (local, remote)), *(_packed(host) for host, _ in (local, remote)))
    every_state, no_cookie = 0xFFFFFFFF, b"\xff" * 8
    question = _REQUEST.pack(
        _REQUEST.size, _SOCK_DIAG_BY_FAMILY, 1, 0, 0, family, socket.IPPROTO_TCP, 0, every_state, *ends, 0, no_cookie
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as kernel:
        kernel.sendto(question, (0, 0))
        answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    if len(answer) < _ANSWER.size:  # NLMSG_ERROR: no such socket, or no such questions
        code = -struct.unpack_from("=i", answer, 16)[0]
        raise OSError(code, os.strerror(code))
    fields: tuple[Any, ...] = _ANSWER.unpack_from(answer)
    state, found, user, inode = fields[6], fields[9:13], fields[18], fields[19]
    return user if inode and state != _LISTEN and found == ends else None


def user_by_table(local: Address, remote: Address) -> int | None:
    """The same by `/proc/net`, which lists every socket."""
    wanted = [f"{_words(host)}:{port:04X}" for host, port in (local, remote)]
    try:
        lines = Path("/proc/net/tcp6" if ":" in local[0] else "/proc/net/tcp").read_text().splitlines()
    except OSError:
        return None
    for line in lines[1:]:
        fields = line.split()
        if fields[1:3] == wanted and fields[9] != "0":
            return int(fields[7])
    return None


def _packed(host: str) -> bytes:
    return ipaddress.ip_address(host).packed.ljust(16, b"\0")


def _words(host: str) -> str:
    """An address as the kernel prints it: each 32 bits as a number of this machine."""
    packed = ipaddress.ip_address(host).packed
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))
