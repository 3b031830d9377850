"""This machine's settings for installing packages, for sandboxes and builds with the network: settings of apt and pip,
proxies, certificates and the resolver, without logins. None of them stay in an image."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from backends.first_use import in_turn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST = "/run/lachesis-host"
"""Place inside of the files."""
APT = f"{HOST}/apt.conf"


def resolver() -> bytes:
    try:
        return Path("/etc/resolv.conf").read_bytes()
    except OSError:
        return b""


def _without_login(value: str) -> str:
    """A URL of the host's settings; empty if it may have a user, password or token, for nobody inside may see them.

    The scheme may be missing, and a password may have any character.
    """
    return "" if re.search(r"[@?]", value) else value


@in_turn
@functools.lru_cache(maxsize=None)
def settings_of_apt() -> bytes:
    """What apt has inside of this machine's: proxies and checks of dates."""
    found = 'APT::Sandbox::User "root";\n'  # it would look whether it is somebody else now
    program = shutil.which("apt-config")
    if program is not None:
        dumped = subprocess.run([program, "dump"], capture_output=True, text=True, check=False).stdout
        for line in dumped.splitlines():
            wanted = re.match(r"Acquire::(https?::Proxy|Check-Valid-Until|Check-Date) ", line)
            if wanted and _without_login(line) and not re.search(r"Proxy-Auto", line):
                found += line + "\n"
    return found.encode()


def _of_pip() -> dict[str, str]:
    """pip's settings on this machine that a build can use, as variables; without logins."""
    program = shutil.which("pip") or shutil.which("pip3")
    found: dict[str, str] = {}
    if program is not None:
        text = subprocess.run([program, "config", "list"], capture_output=True, text=True, check=False).stdout
        # A variable (`:env:`) overrides a file.
        for line in sorted(text.splitlines(), key=lambda line: line.startswith(":env:")):
            match = re.match(
                r"(?:global|install|:env:)\.(index-url|extra-index-url|find-links|trusted-host)='(.*)'$", line
            )
            if match:
                values = [_without_login(each) for each in match[2].replace("\\n", " ").split()]
                found["PIP_" + match[1].upper().replace("-", "_")] = " ".join(each for each in values if each)
    return {name: value for name, value in found.items() if value}


def _beside(index: str) -> list[str]:
    """The folders next to a local index that have its files, by the links of one of its pages."""
    for page in Path(index).glob("*/index.html"):
        named = re.findall(r"""href=["']?\.\./\.\./([^./"'][^/"']*)/""", page.read_text(errors="replace"))
        return sorted({name for name in named if Path(index, "..", name).is_dir()})
    return []


@in_turn
@functools.lru_cache(maxsize=None)
def settings() -> tuple[Mapping[str, str], Sequence[tuple[str, str]]]:
    """Variables, and `(file or folder of this machine, place inside)` of what they name. No URL in them has a login."""
    env = {"APT_CONFIG": APT, "PIP_ROOT_USER_ACTION": "ignore", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    mounts: list[tuple[str, str]] = []
    for name in ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
        if _without_login(os.environ.get(name, "")):
            env[name] = os.environ[name]
    for name, value in _of_pip().items():
        words = []
        for word in value.split():
            local = word[len("file://") :] if word.startswith("file://") else word
            if local.startswith("/"):
                if not os.path.isdir(local):
                    continue
                above, own = os.path.split(os.path.realpath(local))
                place = f"{HOST}/pip{len(mounts)}"
                beside = _beside(local) if "INDEX" in name else []
                mounts += [(os.path.join(above, each), f"{place}/{each}") for each in [own, *beside]]
                word = word.replace(local, f"{place}/{own}")
            words.append(word)
        if words:
            env[name] = " ".join(words)
    bundle = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    if os.path.isfile(bundle):
        mounts.append((os.path.realpath(bundle), f"{HOST}/certificates.pem"))
        for name in ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"):
            env[name] = f"{HOST}/certificates.pem"
    return env, mounts
