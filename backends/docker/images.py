"""Images for Docker sandboxes: inspecting and pulling them, and explaining why that failed."""

from __future__ import annotations

import asyncio
import base64
import binascii
import collections
import contextlib
import json
import logging
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import aiodocker

from backends.errors import BackendError, BackendUnavailable, ImageUnavailable

from .client import Engine, EngineError, explained

Pull = Literal["missing", "always", "never"]
HUB = "docker.io"
BUILT = "lachesis-build:"
"""What begins the names of images that `build` makes."""
SNAPSHOTS, CHECKPOINTS = "lachesis-snapshot", "lachesis-checkpoint"
"""Repositories of images that are made from sandboxes. Those of checkpoints are removed with them, or by `reap`."""
_OWN = (BUILT, f"{SNAPSHOTS}:", f"{CHECKPOINTS}:")
"""What begins the names of images that no registry has."""
_LOG = logging.getLogger(__name__)


async def ensure_image(
    docker: aiodocker.Docker, engine: Engine, name: str, pull: Pull, progress: Callable[[str], None] | None
) -> dict[str, Any]:
    """The engine's description of the image `name`, after pulling it if `pull` requires that.

    `progress` gets a line for each step; without it they are logged.

    Raises:
        BackendUnavailable: the image is missing and cannot be pulled, with the reason and the next step.
        EngineError: the engine failed.
    """
    if pull != "always" or name.startswith(_OWN):
        try:
            return await _inspect(docker, engine, name)
        except EngineError as error:
            if error.status == 400:
                raise ImageUnavailable(f"{name!r} names no image ({error}); write it as REPOSITORY:TAG") from None
            if error.status != 404:
                raise
    if pull == "never":
        raise ImageUnavailable(
            f"image {name!r} is not on the engine and pull is 'never': docker pull {name}, or docker build -t {name} ."
        )
    await _pull(docker, engine, name, progress or _LOG.info)
    return await _inspect(docker, engine, name)


async def _inspect(docker: aiodocker.Docker, engine: Engine, name: str) -> dict[str, Any]:
    async with explained(engine, f"image {name!r}"):
        return await docker.images.inspect(name)


async def _pull(docker: aiodocker.Docker, engine: Engine, name: str, progress: Callable[[str], None]) -> None:
    registry, qualified = split_name(name)
    try:
        credentials = await asyncio.to_thread(read_credentials, registry)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _LOG.warning("no credentials for %s could be read (%s); pulling without", registry, type(error).__name__)
        credentials = None
    progress(f"pulling image {name} from {registry}")
    layers: dict[str, str] = {}
    try:
        async with explained(engine, f"pulling image {name!r}", None):
            async for event in docker.images.pull(qualified if credentials else name, auth=credentials, stream=True):
                status, layer = str(event.get("status", "")), str(event.get("id", ""))
                if status and layers.get(layer) != status:  # not every byte count
                    layers[layer] = status
                    progress(f"{name}: {layer + ': ' if layer else ''}{status}")
    except EngineError as error:
        raise pull_failure(name, registry, bool(credentials), error) from error


async def build(
    docker: aiodocker.Docker,
    engine: Engine,
    archive: IO[bytes],
    name: str,
    *,
    dockerfile: str,
    args: Mapping[str, str],
    tell: Callable[[str], None],
) -> None:
    """Build the image `name` of an archive of its context. The engine keeps layers, and uses them again.

    Raises:
        BackendUnavailable: an instruction failed, with the last lines of the output.
        EngineError: the engine failed.
    """
    last: collections.deque[str] = collections.deque(maxlen=20)
    try:
        async with explained(engine, f"building {dockerfile}", None):
            async for event in docker.images.build(
                fileobj=archive,
                encoding="identity",
                path_dockerfile=dockerfile,
                tag=name,
                buildargs=args,
                forcerm=True,
                stream=True,
            ):
                if "error" in event:  # newer clients raise it
                    raise EngineError(str(event["error"]), 0)
                for line in str(event.get("stream") or event.get("status") or "").splitlines():
                    if line.strip():
                        last.append(line.rstrip())
                        tell(line.rstrip())
    except EngineError as error:
        wrong = "dockerfile parse error" in str(error)
        if (not last and not wrong) or "cannot be reached" in str(error):
            raise
        step = next((line for line in reversed(last) if line.startswith("Step ")), dockerfile)
        said = "\n".join(last)
        raise BackendUnavailable(
            f"{step}: {error}. Next step: fix the instruction or its requirements; the last lines:\n{said}"
        ) from error


def pull_failure(name: str, registry: str, with_credentials: bool, error: EngineError) -> BackendError:
    """The error for the user, from the engine's text, which differs between engines, versions and registries."""
    text = str(error).lower().replace(name.lower(), "")
    if error.status == 0 and "cannot be reached" in text:
        return error
    if any(word in text for word in ("no such host", "dial tcp", "timeout", "refused", "unreachable", "tls", "eof")):
        return BackendUnavailable(
            f"image {name!r} is not on the engine, and its registry {registry} cannot be reached from there ({error}); "
            f"check the network, or bring the image by `docker save` and `docker load`"
        )
    if any(word in text for word in ("unauthorized", "authentication required", "denied", "no basic auth")):
        who = "these credentials do not allow it" if with_credentials else "there are no credentials for it"
        return ImageUnavailable(
            f"image {name!r} is denied by {registry}: it does not exist, or {who} ({error}); docker login {registry}"
        )
    if any(
        word in text for word in ("not found", "manifest unknown", "does not exist", "no such image", "invalid ref")
    ):
        return ImageUnavailable(f"there is no image {name!r} in {registry} ({error}); check its name and tag")
    return BackendError(f"image {name!r} could not be pulled from {registry}: {error}")


def split_name(name: str) -> tuple[str, str]:
    """The registry of an image, and the image's name including the registry."""
    first, slash, _ = name.partition("/")
    if slash and ("." in first or ":" in first or first == "localhost"):
        return first, name
    return HUB, f"{HUB}/{name if slash else 'library/' + name}"


def read_credentials(registry: str, folder: Path | None = None) -> dict[str, str] | None:
    """The credentials that `docker login` saved for this registry, as the engine takes them; None without any.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: they cannot be read, or the helper that keeps them failed.
    """
    folder = folder or Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except FileNotFoundError:
        return None
    names = ["https://index.docker.io/v1/", HUB] if registry == HUB else [registry, f"https://{registry}"]
    helpers = config.get("credHelpers") or {}
    for name in names:
        helper = helpers.get(name) or config.get("credsStore")
        if helper:
            found = _ask_helper(helper, name)
            if found:
                return found
        entry = (config.get("auths") or {}).get(name) or {}
        if entry.get("identitytoken"):
            return {"identitytoken": entry["identitytoken"], "serveraddress": name}
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            user, colon, password = base64.b64decode(entry.get("auth", "")).decode().partition(":")
            if colon:
                return {"username": user, "password": password, "serveraddress": name}
    return None


def _ask_helper(helper: str, name: str) -> dict[str, str] | None:
    # The protocol of credential helpers: the name on standard input, JSON on standard output.
    done = subprocess.run(
        [f"docker-credential-{helper}", "get"], input=name.encode(), capture_output=True, timeout=30, check=False
    )
    if done.returncode != 0:
        return None  # it has no credentials for this name
    answer = json.loads(done.stdout)
    user, secret = str(answer["Username"]), str(answer["Secret"])
    if user == "<token>":
        return {"identitytoken": secret, "serveraddress": name}
    return {"username": user, "password": secret, "serveraddress": name}
