"""Where pools of this user are: a file for each, with its address and its key, which nobody else can read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backends import BackendUnavailable, SettingsError

from .wire import TOKEN, URL

OF_RUN = "run-"
"""Names of pools of single runs begin so."""


def folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "lachesis/pools"


def write_private(path: Path, text: str) -> None:
    """Replace a file that only this user can read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    other = path.with_suffix(f".{os.getpid()}")
    with os.fdopen(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    other.replace(path)


def publish(pool: str, url: str, token: str) -> Path:
    """Say where a pool is, to runs of this user."""
    path = folder() / f"{pool}.json"
    write_private(path, json.dumps({"url": url, "token": token, "pid": os.getpid()}) + "\n")
    return path


def published() -> dict[str, dict[str, Any]]:
    """The pools of this user by name."""
    found = {}
    for path in sorted(folder().glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            found[path.stem] = json.loads(path.read_text())
    return found


def withdraw(pool: str) -> None:
    """Say that a pool of this process is no more."""
    if published().get(pool, {}).get("pid") == os.getpid():
        (folder() / f"{pool}.json").unlink(missing_ok=True)


@contextlib.contextmanager
def reserved(pool: str) -> Iterator[None]:
    """The name of a pool, for one process.

    Raises:
        SettingsError: another one has it.
    """
    folder().mkdir(parents=True, exist_ok=True)
    path = folder() / f"{pool}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(path.stat(), os.fstat(lock.fileno())):
                raise BlockingIOError  # the file of one that ended just now
        except OSError:
            step = "--name another, or `lachesis pool down`"
            raise SettingsError(f"pool {pool!r} runs already. Next step: {step}") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def known_pool(url: str = "", token_file: str = "", pool: str = "") -> tuple[str, str]:
    """The address and the key of a pool: as given, else of the process' variables, else of the only pool of this user.

    Args:
        pool: its name, which goes before the variables. Those of single runs (`run-...`) have to be named.

    Raises:
        BackendUnavailable: there is none, or there are several.
    """
    here = published()
    if pool:
        if pool not in here:
            raise BackendUnavailable(f"there is no pool {pool!r} here. Next step: lachesis pool up --name {pool}")
        return here[pool]["url"], here[pool]["token"]
    url = (url or os.environ.get(URL, "")).rstrip("/")
    token = os.environ.get(TOKEN, "")
    if token_file:
        try:
            token = Path(token_file).expanduser().read_text().strip()
        except OSError as error:
            raise BackendUnavailable(f"the key of the pool cannot be read: {error}") from None
    if url:
        same = [each["token"] for each in here.values() if each["url"] == url]
        return url, same[0] if same and not token_file else token
    others = [place for name, place in here.items() if not name.startswith(OF_RUN)]
    if len(others) != 1:
        step = "name one with the option url" if others else "start one: lachesis pool up"
        raise BackendUnavailable(f"there is {'more than one' if others else 'no'} pool here. Next step: {step}")
    return others[0]["url"], others[0]["token"]
