"""Images of sandboxes: made of a Dockerfile, named, or root folders.

  built = await image_for(Build(Path("task/environment")), backend)
  sandbox = await backend.create(SandboxSpec(image=built.image, env=built.env, workdir=built.workdir))

builds       what is asked for and what is made
dockerfile   reads a Dockerfile
context      .dockerignore, and what COPY and ADD take
bases        what FROM becomes: a table, and debootstrap
player       plays instructions, one layer each
walls        where RUN runs
trees        root folders as layers
store        layers in the user's cache
engine       builds by Docker and podman
far          roots on machines that ssh reaches
"""

from __future__ import annotations

import asyncio
import logging
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from backends.base import Backend, SupportsImagesOf

from .builds import Build, BuiltImage
from .errors import ImageError, refused
from .store import Layer, listed, prune

__all__ = ["Build", "BuiltImage", "ImageError", "Layer", "image_for", "listed", "prune"]

_LOG = logging.getLogger(__name__)
_REFERENCE = re.compile(r"[a-z][a-z-]*:(?://)?[^:]*[/]")


async def image_for(
    source: Build | str,
    backend: Backend,
    *,
    bases: Mapping[str, str] | None = None,
    tell: Callable[[str], None] | None = None,
) -> BuiltImage:
    """The image of `source` for sandboxes of `backend`: made if it is a `Build`, else found.

    A text is a root folder, or a name: docker pulls it, singularity too (as `docker://NAME`), local and ssh look it up
    in the table of bases. A layer that exists is used again.

    Args:
        bases: pattern of base names -> root folder, tar file or another name; before the user's table (`bases.table`).
        tell: gets lines about the progress and the output of commands; without it, they are logged.

    Raises:
        ImageError: the Dockerfile cannot be played here, or one of its commands failed.
        BackendUnavailable: there is no image of that name, or the backend cannot run here.
        BackendError: the build failed for another reason; trying again may help.
    """
    from . import bases as table_of_bases
    from . import player
    from .context import Context

    say = tell or _LOG.info
    name = await backend.images_of() if isinstance(backend, SupportsImagesOf) else backend.name
    if name == "docker" and name != backend.name and not isinstance(source, str):
        raise refused(f"backend {backend.name!r}", "its engines are elsewhere", "push the image, and give its name")
    if name == "docker" and name == backend.name:
        from . import engine

        return BuiltImage(*await engine.image(source, backend, say))
    if name not in ("local", "singularity", "ssh"):
        if isinstance(source, str):
            return BuiltImage(source)
        raise refused(f"backend {name!r}", "it cannot build a Dockerfile", "use local, singularity, ssh or docker")
    if isinstance(source, str):
        if source.startswith(("/", ".", "~")) or (name == "singularity" and Path(source).exists()):
            return BuiltImage(source if name == "ssh" else str(Path(source).expanduser().absolute()))
        if name == "singularity":
            return BuiltImage(source if _REFERENCE.match(source) else f"docker://{source}")
    table = dict(bases or {})
    for pattern, value in table_of_bases.table().items():
        table.setdefault(pattern, value)
    if isinstance(source, str):
        root, state = await player.named(source, table, say)
    else:
        context = await asyncio.to_thread(Context, Path(source.context), source.dockerfile)
        root, state = await player.play(context, source.dockerfile, source.args, table, say, source.timeout)
    image = str(root)
    if name == "ssh":
        from . import far

        image = await far.brought(root, backend, platform.machine(), say)
    is_root = name != "singularity" and (state.user or "root").partition(":")[0] in ("root", "0")
    return BuiltImage(image, dict(state.env), state.workdir, state.user, is_root)
