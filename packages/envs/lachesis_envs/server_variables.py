"""`ATROPOS_SERVER_*`: variables, and lines of a `.env` in the folder, as settings of a server."""

from __future__ import annotations

import os
from pathlib import Path

from rich.console import Console

from lachesis.settings.server_settings import ServerConfig

_PREFIX = "ATROPOS_SERVER_"
_named: set[Path] = set()


def server_of_variables() -> ServerConfig | None:
    """The server that `ATROPOS_SERVER_{BASE_URL,MODEL,API_KEY}` name; None without a URL.

    Variables of this process win over a `.env` in the working folder, of which nothing else is read, and nothing gets
    into `os.environ`. What it sets is named once.
    """
    of_file = _of_file(Path(".env").absolute())
    given = {**of_file, **os.environ}
    if not (base_url := given.get(f"{_PREFIX}BASE_URL")):
        return None
    # A key of this process goes to no URL that only a file in the folder names.
    keys = given if f"{_PREFIX}BASE_URL" in os.environ else of_file
    model, key = given.get(f"{_PREFIX}MODEL", "default"), keys.get(f"{_PREFIX}API_KEY", "")
    return ServerConfig(base_url=base_url, model_name=model, api_key=key)


def _of_file(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    from dotenv import dotenv_values

    try:
        found = dotenv_values(path, interpolate=False)
    except (OSError, ValueError):
        return {}
    kept = {name: value for name, value in found.items() if name.startswith(_PREFIX) and value}
    if (used := sorted(kept.keys() - os.environ.keys())) and path not in _named:
        _named.add(path)
        text = f"note: {', '.join(used)} of {path}"
        Console(emoji=False, stderr=True).print(text, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return kept
