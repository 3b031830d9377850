"""Source archives of PyPI, each known by its SHA-256, kept in a cache."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from backends.errors import LachesisError
from backends.host.folders import user_cache

_INDEX = "https://pypi.org/simple"
_LARGEST = 64 << 20


class ArchiveError(LachesisError):
    """An archive is not to be had, or is not the one that the recipe names."""


def cache_folder() -> Path:
    return user_cache() / "archives"


def archive(name: str, sha256: str, folders: Sequence[Path] = ()) -> Mapping[str, bytes]:
    """The files of an archive, by their path below its top folder.

    Args:
        name: `PACKAGE-VERSION.tar.gz`.
        sha256: of the archive, in hex.
        folders: where it may lie already, before the cache and the index (`PIP_INDEX_URL`, else pypi.org).

    Raises:
        ArchiveError: it cannot be fetched, or is another one.
    """
    for folder in (*folders, cache_folder()):
        path = folder / name
        if path.is_file() and hashlib.sha256(data := path.read_bytes()).hexdigest() == sha256:
            return _files(data)
    data = _fetched(name)
    if (found := hashlib.sha256(data).hexdigest()) != sha256:
        raise ArchiveError(f"{name}: its SHA-256 is {found}, the recipe names {sha256}. Next step: use another index")
    path = cache_folder() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:  # several builders may write at once
        file.write(data)
    Path(file.name).replace(path)
    return _files(data)


def _fetched(name: str) -> bytes:
    index = os.environ.get("PIP_INDEX_URL", _INDEX).rstrip("/")
    package = re.sub(r"[-_.]+", "-", name.rpartition("-")[0]).lower()
    page = f"{index}/{package}/"
    try:
        text = _get(page, "application/vnd.pypi.simple.v1+json, text/html;q=0.5").decode()
        if text.lstrip().startswith("{"):
            urls = [file["url"] for file in json.loads(text)["files"] if file["filename"] == name]
        else:
            urls = re.findall(rf'href="([^"]*/{re.escape(name)}(?:#[^"]*)?)"', text)
        if not urls:
            raise ArchiveError(f"{page} has no {name}. Next step: name an index that has it in PIP_INDEX_URL")
        return _get(urllib.parse.urljoin(page, urls[0]), "*/*")
    except (OSError, ValueError, KeyError) as error:
        raise ArchiveError(
            f"{name} cannot be fetched from {page}: {error}. Next step: try again with a network, or put the file into "
            f"{cache_folder()}"
        ) from error


def _get(url: str, accept: str) -> bytes:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"{url!r} is not an address of an index")
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=60) as answer:
        data: bytes = answer.read(_LARGEST + 1)
    if len(data) > _LARGEST:
        raise ValueError(f"{url} is larger than {_LARGEST} bytes")
    return data


def _files(data: bytes) -> Mapping[str, bytes]:
    files = {}
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as opened:
        for member in opened:
            parts = PurePosixPath(member.name).parts[1:]
            content = opened.extractfile(member) if member.isfile() else None
            if content is not None and parts and ".." not in parts:
                files["/".join(parts)] = content.read()
    return files
