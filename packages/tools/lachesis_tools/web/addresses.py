"""Which addresses a model may open by a live provider: public ones, never this machine or its network.

Services in a private network, such as the metadata service of a cloud, trust whoever reaches them.
"""

from __future__ import annotations

import asyncio
import socket
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import urlsplit

from lachesis_tools.asking import ServiceUnavailable
from lachesis_tools.tool_registry import ToolFailure

_TRANSLATED = ip_network("64:ff9b::/96")
"""IPv4 addresses as a NAT64 gateway reaches them."""
_UNKNOWN = (socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY)
"""What a name server says of a host that does not exist. All else is a failure of the look-up."""


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
                if error.errno not in _UNKNOWN:
                    raise ServiceUnavailable(f"the name {host} cannot be looked up: {error}") from error
                raise ToolFailure(f"there is no host {host}") from None
            require_public(host, (each["host"] for each in found))
            return found

    return PublicResolver()
