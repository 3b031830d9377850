"""The tool `patch`."""

from __future__ import annotations

import importlib
from typing import Literal

from backends.tasks import in_own_thread
from lachesis_tools.tool_registry import tool
from lachesis_tools.tool_session import ToolSession


@tool(toolset="file")
async def patch(
    session: ToolSession,
    mode: Literal["replace", "patch"] = "replace",
    path: str | None = None,
    old_string: str | None = None,
    new_string: str | None = None,
    replace_all: bool = False,
    patch: str | None = None,
) -> str:
    """Edit text files; returns a unified diff of what changed. Mode replace puts new_string in the place of
    old_string, which must be in the file exactly once, white space included. Mode patch applies a patch to one or
    more files, or to none if any part does not fit. A patch looks like this: '*** Begin Patch', then for each file
    '*** Update File: path' (or '*** Add File: path' with + lines, or '*** Delete File: path'), optionally
    '*** Move to: new path', then changes made of '@@ a line above', ' unchanged', '-removed' and '+added' lines, and
    '*** End Patch' at the end.

    Args:
        mode: replace needs path, old_string and new_string; patch needs patch.
        path: The file, for mode replace. A relative path starts at the initial working directory.
        old_string: The text to replace.
        new_string: The text to put there; empty to delete.
        replace_all: Replace every occurrence.
        patch: The patch, for mode patch.
    """
    # Most rollouts edit nothing: what does it is loaded by the first that does, beside the event loop.
    work = await in_own_thread(importlib.import_module, "lachesis_tools.patching")
    return str(await work.patched(session, mode, path, old_string, new_string, replace_all, patch))
