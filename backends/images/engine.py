"""Images by an engine (Docker, podman): it builds and pulls them itself."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from backends.base import Backend
from backends.docker.images import BUILT

from .builds import Build
from .context import Context
from .errors import refused

if TYPE_CHECKING:
    from backends.docker import DockerBackend


async def image(
    source: Build | str, backend: Backend, tell: Callable[[str], None]
) -> tuple[str, dict[str, str], str | None, str | None]:
    """The name of an image, its variables, working directory and user."""
    docker = cast("DockerBackend", backend)
    if isinstance(source, str):
        return _facts(source, await docker.image(source, tell))
    context = Context(source.context, source.dockerfile)
    with tempfile.TemporaryFile() as file:
        await asyncio.to_thread(context.archive, file)
        file.seek(0)
        digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        digest.update(repr((source.dockerfile, sorted(source.args.items()))).encode())
        file.seek(0)
        name = BUILT + digest.hexdigest()[:32]
        path = context.dockerfile.relative_to(context.folder).as_posix()
        try:
            async with asyncio.timeout(source.timeout):
                await docker.build(file, name, dockerfile=path, args=source.args, tell=tell)
        except TimeoutError as error:
            step = "raise its timeout, or make the slowest step faster"
            raise refused(source.dockerfile, f"the build did not end within {source.timeout:g} s", step) from error
        return _facts(name, await docker.image(name, tell))


def _facts(name: str, found: dict[str, Any]) -> tuple[str, dict[str, str], str | None, str | None]:
    config = found.get("Config") or {}
    env = dict(entry.split("=", 1) for entry in config.get("Env") or () if "=" in entry)
    return name, env, config.get("WorkingDir") or None, config.get("User") or None
