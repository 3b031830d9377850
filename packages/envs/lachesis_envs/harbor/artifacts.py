"""The artifacts of a step: which they are, and their copies on this machine."""

from __future__ import annotations

import json
import shlex
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from lachesis.tool_context.tool_context import ToolContext
from lachesis_envs.task_folders import Step

ARTIFACTS = "/logs/artifacts"
_REMOVE = """for at; do
  folder=${at%/*}; mode=$(stat -c %a -- "$folder")
  chmod u+wx -- "$folder"; [ -L "$at" ] || chmod -R u+rwX -- "$at"
  rm -rf -- "$at"; chmod "$mode" -- "$folder"
done"""
"""The agent's folders may be read-only."""


def artifacts_of(step: Step) -> list[dict[str, Any]]:
    """The artifacts of a step, /logs/artifacts first: `source`, `destination` below a folder, and `exclude`."""
    found: list[dict[str, Any]] = []
    for entry in step.artifacts:
        given = {"source": entry} if isinstance(entry, str) else entry.model_dump()
        source = str(given["source"])
        path = PurePosixPath(given.get("destination") or source)
        parts = [part for part in path.parts if part.strip("/") and part != ".."]  # "//" is a root as well
        found.append(
            {"source": source, "destination": str(PurePosixPath(*parts)), "exclude": given.get("exclude") or []}
        )
    if not any(artifact["source"].rstrip("/") == ARTIFACTS for artifact in found):
        found.insert(0, {"source": ARTIFACTS, "destination": ARTIFACTS[1:], "exclude": []})
    return found


async def remove_excluded(step: Step, verifier: ToolContext) -> None:
    for artifact in artifacts_of(step):
        for pattern in artifact["exclude"]:
            where, named = shlex.quote(artifact["source"]), shlex.quote("*/" + pattern.strip("/"))
            await verifier.terminal(f"find {where} -mindepth 1 -path {named} -prune -exec bash -c '{_REMOVE}' . {{}} +")


async def keep_artifacts(step: Step, ctx: ToolContext, keep: Path, record: dict[str, Any]) -> None:
    """Copy the artifacts out, and write Harbor's list of them. What cannot be copied is noted."""
    entries = []
    for artifact in artifacts_of(step):
        local = keep / "artifacts" / artifact["destination"]
        kind, status = "directory", "ok"
        try:
            kind = await fetch(ctx, artifact["source"], local)
        except OSError as error:
            status = "failed"
            if not isinstance(error, FileNotFoundError):
                record["notes"].append(f"artifact {artifact['source']} was not kept: {error}")
        shown = f"artifacts/{artifact['destination']}"
        entries.append({"source": artifact["source"], "destination": shown, "type": kind, "status": status})
    (keep / "artifacts").mkdir(parents=True, exist_ok=True)
    (keep / "artifacts/manifest.json").unlink(missing_ok=True)  # an artifact at the root may have one, read-only
    (keep / "artifacts/manifest.json").write_text(json.dumps(entries, indent=2))


async def fetch(ctx: ToolContext, source: str, local: Path) -> Literal["directory", "file"]:
    """Copy a file or folder of the sandbox to `local`; which of both it is. Raises `OSError`."""
    try:
        await ctx.download_dir(source, local)
        return "directory"
    except NotADirectoryError:
        await ctx.download_file(source, local)
        return "file"


async def put(ctx: ToolContext, local: Path, target: str) -> None:
    """Copy a file or folder of this machine into the sandbox, if there is one."""
    if local.is_dir():
        await ctx.upload_dir(local, target)
    elif local.is_file():
        await ctx.upload_file(local, target)
