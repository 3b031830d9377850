"""The machine to connect to, and the connection, or why there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncssh

from backends.errors import BackendUnavailable

CONNECT_TIMEOUT, LOGIN_TIMEOUT, HUB_TIMEOUT = 15.0, 30.0, 60.0
KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
"""A connection without an answer for 15 to 20 seconds is replaced by a new one."""


@dataclass(frozen=True, slots=True)
class Target:
    """The machine to connect to, and how. Fields that are None come from the ssh configuration."""

    host: str
    port: int | None = None
    username: str | None = None
    client_keys: tuple[str, ...] | None = field(default=None, repr=False)
    known_hosts: str | None = None
    config: tuple[str, ...] | None = None
    python: str = ""
    """Path of the far Python; empty: /usr/bin/python3, or the one on PATH."""
    folder: str = ""
    """Far folder of this user's sandboxes; empty: /tmp/lachesis-ssh-UID."""

    @property
    def name(self) -> str:
        user = f"{self.username}@" if self.username else ""
        return f"{user}{self.host}" + (f":{self.port}" if self.port else "")

    @property
    def command(self) -> str:
        """The ssh command line of the same connection, for people to try."""
        user = f"{self.username}@" if self.username else ""
        return "ssh" + (f" -p {self.port}" if self.port else "") + f" {user}{self.host}"


class _HostKeys(asyncssh.SSHClient):
    """Looks keys up in known_hosts, and keeps the result: the library does not tell unknown keys from changed ones."""

    def __init__(self, files: Sequence[str]) -> None:
        self._files = files
        self.known = False
        self.lost: Exception | None = None
        """Why the connection was lost."""
        self.shown = ""
        """Fingerprint of the key that was rejected."""

    def match(self, host: str, address: str, port: int | None) -> Any:
        found = asyncssh.match_known_hosts(list(self._files) or b"", host, address, port)
        self.known = bool(found[0] or found[1])
        return found

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = f"{key.get_algorithm()} {key.get_fingerprint()}"
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = exc


async def connect(target: Target) -> asyncssh.SSHClientConnection:
    """Raises `BackendUnavailable` with the reason and the next step: host key, login, network."""
    given: dict[str, Any] = {
        "host": target.host,
        "connect_timeout": CONNECT_TIMEOUT,
        "login_timeout": LOGIN_TIMEOUT,
        "keepalive_interval": KEEPALIVE_INTERVAL,
        "keepalive_count_max": KEEPALIVE_COUNT,
        "agent_forwarding": False,
    }
    for option in ("port", "username", "client_keys", "known_hosts", "config"):
        value = getattr(target, option)
        if value is not None:
            given[option] = list(value) if isinstance(value, tuple) else value
    if target.client_keys is not None:
        given["agent_path"] = None  # its keys would go first, and servers count attempts
    keys: _HostKeys | None = None
    try:
        options = await asyncssh.SSHClientConnectionOptions.construct(**given)
        keys = _HostKeys(_known_hosts_files(target, options.known_hosts))
        owner = keys
        options = await asyncssh.SSHClientConnectionOptions.construct(
            options, known_hosts=keys.match, client_factory=lambda: owner
        )
        try:
            return await asyncssh.connect(target.host, options=options)
        except (asyncssh.ConnectionLost, asyncssh.KeyExchangeFailed, ConnectionResetError):
            if not keys.known:
                raise
            # Only known kinds of keys were offered, and a server that has none of them hangs up. Offered all kinds, it
            # shows the one that it has.
            return await asyncssh.connect(target.host, options=options, server_host_key_algs="default")
    except (asyncssh.Error, asyncssh.KeyImportError, asyncssh.ConfigParseError, OSError, ValueError) as error:
        raise _unavailable(target, error, keys) from None


def _known_hosts_files(target: Target, configured: Any) -> list[str]:
    if configured is None:
        raise BackendUnavailable(
            f"{target.name}: the ssh configuration says `UserKnownHostsFile none`, so that any machine could "
            "impersonate it. Next step: name a file there, or as the option known_hosts"
        )
    if target.known_hosts is not None:
        if not Path(target.known_hosts).is_file():
            raise FileNotFoundError(f"there is no file {target.known_hosts} (the option known_hosts)")
        return [target.known_hosts]
    files = [str(Path(name).expanduser()) for name in configured or ("~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts")]
    return [name for name in files if os.access(name, os.R_OK)]


def _unavailable(target: Target, error: Exception, keys: _HostKeys | None) -> BackendUnavailable:
    """`error` with its reason and the next step."""
    detail = str(error).strip() or type(error).__name__
    port = f"-p {target.port} " if target.port else ""
    where = target.known_hosts or "~/.ssh/known_hosts"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        shown = f" It shows {keys.shown}." if keys is not None and keys.shown else ""
        if keys is not None and keys.known:
            reason = (
                f"its host key is not the one in {where}: the machine was reinstalled, or another one answers.{shown}"
            )
            name = f"[{target.host}]:{target.port}" if target.port not in (None, 22) else target.host
            fix = f"ask its administrator; if the new key is right: ssh-keygen -R '{name}' -f {where}, then add it"
        else:
            reason = f"its host key is unknown: {where} has none for it.{shown}"
            fix = f"compare that with the machine's key, then: ssh-keyscan {port}{target.host} >> {where}"
    elif isinstance(error, asyncssh.PermissionDenied):
        reason = f"it rejects this user and these keys ({detail})"
        fix = f"ssh-copy-id {port}{target.command.rpartition(' ')[2]}, or name the right username and client_keys"
    elif isinstance(error, asyncssh.KeyImportError | asyncssh.KeyEncryptionError):
        reason = f"a private key cannot be used ({detail})"
        fix = "load it into the agent with ssh-add, or name another one"
    elif isinstance(error, socket.gaierror):
        reason, fix = f"there is no such host ({detail})", "correct `host`, or name it in ~/.ssh/config"
    elif isinstance(error, asyncssh.Error):
        reason, fix = f"the ssh connection could not be made ({detail})", f"try: {target.command} true"
    elif isinstance(error, FileNotFoundError | ValueError | asyncssh.ConfigParseError):
        reason, fix = detail, "correct the option, or the ssh configuration"
    else:
        late = f"no answer within {CONNECT_TIMEOUT:g} s" if isinstance(error, TimeoutError) else detail
        reason = f"it cannot be reached ({late})"
        fix = f"start sshd there, or check host and port with: {target.command} true"
    return BackendUnavailable(f"{target.name}: {reason.rstrip('.')}. Next step: {fix}")
