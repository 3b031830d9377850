"""The images of checkpoints: removed when nothing refers to a checkpoint, or once their owner is gone."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import weakref

import aiodocker

from backends.errors import BackendError
from backends.owner import is_gone

from .client import Engine, client, explained, request
from .container import CHECKPOINT
from .images import CHECKPOINTS

_LOG = logging.getLogger(__name__)


class SavedImage:
    """An image that is removed with this object, in a thread of its own: any thread may be the last to refer to it."""

    def __init__(self, engine: Engine, api: str, name: str) -> None:
        weakref.finalize(self, _removed_somewhere, engine, api, name)


def _removed_somewhere(engine: Engine, api: str, name: str) -> None:
    try:
        threading.Thread(target=_remove, args=(engine, api, name), name="lachesis-image").start()
    except RuntimeError:  # the interpreter ends
        _remove(engine, api, name)


def _remove(engine: Engine, api: str, name: str) -> None:
    async def remove() -> None:
        async with client(engine, api) as docker, explained(engine, f"removing the image {name}"):
            await remove_image(docker, name)

    try:
        asyncio.run(remove())
    except (BackendError, RuntimeError, OSError) as error:
        _LOG.warning("the image %s is left: %s. `lachesis sandboxes reap` removes it", name, error)


async def remove_image(docker: aiodocker.Docker, name: str) -> None:
    """What other images lie on stays until they are removed, and what a container is made of until `reap` finds it.

    Raises:
        aiodocker.DockerError: the engine failed.
    """
    status, _, body = await request(docker, "DELETE", f"images/{name}")
    if status not in (200, 404, 409):
        raise aiodocker.DockerError(status, body.decode(errors="replace"))


async def remove_images(docker: aiodocker.Docker, engine: Engine, run_id: str | None, everyone: bool) -> None:
    """Remove the images of checkpoints whose owners are gone, or all, or only those of a run."""
    filters = json.dumps({"reference": [f"{CHECKPOINTS}:*"]})
    async with explained(engine, "removing the images of checkpoints"):
        _, _, body = await request(docker, "GET", "images/json", {"filters": filters})
        for row in json.loads(body):
            labels = row.get("Labels") or {}
            if run_id is not None and labels.get(f"{CHECKPOINT}.run_id") != run_id:
                continue
            if everyone or is_gone(labels.get(CHECKPOINT, "")):
                for name in row.get("RepoTags") or []:
                    await remove_image(docker, name)
