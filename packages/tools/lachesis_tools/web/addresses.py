"""Which addresses a model may open by a live provider: public ones, never this machine or its network.

Services in a private network, such as the metadata service of a cloud, trust whoever reaches them.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any, Final
from urllib.parse import urlsplit

from lachesis_tools.asking import ServiceUnavailable
from lachesis_tools.tool_registry import ToolFailure

_TRANSLATED = ip_network("64:ff9b::/96")
"""IPv4 addresses as a NAT64 gateway reaches them."""
_UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)
"""What a name server says of a host that does not exist. All else is a failure of the look-up."""
_HERE: Final = frozenset(
    {
        *(errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL),
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM),
        *(errno.EPERM, errno.EACCES),  # a firewall of this machine
    }
)
"""Of the system, where a connection fails because of this machine or its network, whatever the other side does."""
_INTERNET: Final = {socket.AF_INET: "1.1.1.1", socket.AF_INET6: "2606:4700::1111"}


def has_route(*families: socket.AddressFamily) -> bool:
    """Whether this machine knows a way to the internet. Nothing is sent."""
    for family in families or _INTERNET:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((_INTERNET[family], 53))
                return True
        except OSError:
            pass
    return False


def failed_here(error: Exception) -> bool:
    """Whether a page could not be opened because of this machine or its network.

    An address of IPv6, where this machine has none, is the choice of who wrote it.
    """
    system = getattr(error, "os_error", error)
    if isinstance(system, socket.gaierror):
        return _lookup_failed(system)
    if not isinstance(system, OSError):
        return False
    # For a host with several addresses, aiohttp names all errors in the text, and no number where they differ.
    numbers = {system.errno} if system.errno else {int(each) for each in re.findall(r"\[Errno (\d+)\]", str(system))}
    if not numbers or not numbers <= _HERE:
        return False
    return ":" not in str(getattr(error, "host", "")) or has_route(socket.AF_INET6) or not has_route()


def _lookup_failed(error: socket.gaierror) -> bool:
    """Whether a host may exist, although it was not found. On a machine without a network, none is."""
    return error.errno not in _UNKNOWN or not has_route()


def is_public(address: str) -> bool:
    """Whether an IP address is one of the internet."""
    found = ip_address(address.partition("%")[0])
    if isinstance(found, IPv6Address):
        if found in _TRANSLATED:
            return False
        found = found.ipv4_mapped or found.sixtofour or found
    return found.is_global and not found.is_multicast


async def check_url(url: str) -> None:
    """Raises `ToolFailure` where `url` is not an http(s) address of a public host.

    A host that no name server knows passes: who opens it says so. The address is checked again at the connection, by
    `public_resolver`, for the name can have another one by then.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ToolFailure(f"{url!r} is not an address of a page: {error}") from None
    if parts.scheme not in ("http", "https") or not host:
        raise ToolFailure(f"{url!r} is not an address of a page; it begins with http:// or https://")
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port or 80, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        return
    require_public(host, (str(each[4][0]) for each in found))


def require_public(host: str, addresses: Any) -> None:
    """Raises `ToolFailure` if any of the addresses of `host` is not public."""
    if not all(is_public(address) for address in addresses):
        raise ToolFailure(f"{host} is an address of a private network, which is not open to you")


def public_resolver() -> Any:
    """A resolver for aiohttp that knows public hosts only."""
    from aiohttp.resolver import ThreadedResolver

    class PublicResolver(ThreadedResolver):
        async def resolve(self, host: str, port: int = 0, family: Any = socket.AF_INET) -> Any:
            try:
                found = await super().resolve(host, port, family)
            except socket.gaierror as error:
                if _lookup_failed(error):
                    raise ServiceUnavailable(f"the name {host} cannot be looked up: {error}") from error
                raise ToolFailure(f"there is no host {host}") from None
            require_public(host, (each["host"] for each in found))
            return found

    return PublicResolver()
