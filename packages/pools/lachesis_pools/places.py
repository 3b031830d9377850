"""Where pools of this user are: a file for each, with its address and its key, which nobody else can read."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from backends import BackendUnavailable

from .wire import TOKEN, URL


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


def known_pool(url: str = "", token_file: str = "", pool: str = "") -> tuple[str, str]:
    """The address and the key of a pool: as given, else of the process' variables, else of the only pool of this user.

    Raises:
        BackendUnavailable: there is none, or there are several.
    """
    url = (url or os.environ.get(URL, "")).rstrip("/")
    token = os.environ.get(TOKEN, "")
    if token_file:
        try:
            token = Path(token_file).expanduser().read_text().strip()
        except OSError as error:
            raise BackendUnavailable(f"the key of the pool cannot be read: {error}") from None
    here = published()
    if url:
        same = [each["token"] for each in here.values() if each["url"] == url]
        return url, token or (same[0] if same else "")
    if pool:
        here = {name: place for name, place in here.items() if name == pool}
    if len(here) != 1:
        step = "name one with the option url" if here else "start one: lachesis pool up"
        raise BackendUnavailable(f"there is {'more than one' if here else 'no'} pool here. Next step: {step}")
    [place] = here.values()
    return place["url"], token or place["token"]
