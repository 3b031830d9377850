"""The programs of the browser: agent-browser, which is copied into sandboxes that do not see it, and Chromium."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

INSTALL = "npm install agent-browser@0.41.2"
_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64"}
_CHROMIUM = ("/usr/lib/chromium/chromium", "/usr/lib64/chromium-browser/chromium-browser")
"""Programs, not the scripts around them, which read files that a sandbox does not have."""


def check_browser_requirements() -> str | None:
    """Why the tools cannot work on this machine, with the next step; None if they can."""
    if agent_browser() is None:
        named = os.environ.get("AGENT_BROWSER_PATH")
        where = f"AGENT_BROWSER_PATH is {named!r}, which is no program of it" if named else "it is not installed"
        return f"needs agent-browser, and {where}: {INSTALL} (in this folder, or with -g)"
    if not Path(chromium()).exists() and "AGENT_BROWSER_EXECUTABLE_PATH" not in os.environ:
        return (
            "needs Chromium: apt-get install chromium; or set AGENT_BROWSER_EXECUTABLE_PATH to the place of another "
            "Chrome in the sandbox"
        )
    return None


def agent_browser() -> Path | None:
    """agent-browser's binary: what AGENT_BROWSER_PATH names, or that of the package which npm installed in this folder,
    on PATH, or where npm keeps global packages."""
    return next(filter(None, map(_binary, _places())), None)


def chromium() -> str:
    """The place of Chromium's program in the sandbox."""
    named = os.environ.get("AGENT_BROWSER_EXECUTABLE_PATH")
    return named or next((path for path in _CHROMIUM if Path(path).exists()), _CHROMIUM[0])


def _places() -> Iterator[Path]:
    if named := os.environ.get("AGENT_BROWSER_PATH"):
        yield Path(named)
        return
    package = "agent-browser/bin/agent-browser.js"
    yield Path("node_modules", package)
    if found := shutil.which("agent-browser"):
        yield Path(found)
    if npm := shutil.which("npm"):
        yield Path(npm).parent.parent / "lib/node_modules" / package


def _binary(place: Path) -> Path | None:
    """The binary for this machine: `place`, or beside the script for node at `place`."""
    place = place.resolve()
    if place.suffix == ".js":
        place = place.with_name(f"agent-browser-linux-{_ARCHITECTURES.get(platform.machine(), platform.machine())}")
    return place if place.is_file() else None
