"""The budget of tool results: results that are too long are written to files in the sandbox, and the model reads the
beginning.

A result over its tool's limit is written to `/tmp/hermes-results/CALL_ID-HASH.txt`. Then, while the results of one turn
exceed the budget of a turn, the longest follows. The model reads a preview with the path; the preview is the result in
every record, since it is what the model saw.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from lachesis_tools.dispatch import ToolResult
from lachesis_tools.json_results import as_json
from lachesis_tools.text import cap_text
from lachesis_tools.tool_session import ToolSession

DEFAULT_RESULT_SIZE_CHARS = 100_000
DEFAULT_TURN_BUDGET_CHARS = 200_000
DEFAULT_PREVIEW_SIZE_CHARS = 1_500
UNLIMITED = ("read_file",)
"""Tools without a limit of their own, whatever the overrides say: the model reads a persisted result with them."""
FOLDER = "hermes-results"
TAG = "persisted-output"


@dataclass(frozen=True, slots=True)
class ResultBudget:
    """Limits in characters."""

    default_result_size: int = DEFAULT_RESULT_SIZE_CHARS
    """Of one result."""
    turn_budget: int = DEFAULT_TURN_BUDGET_CHARS
    """Of all results of one turn."""
    preview_size: int = DEFAULT_PREVIEW_SIZE_CHARS
    """Of the beginning that the model reads in place of a result."""
    tool_overrides: Mapping[str, int] = field(default_factory=dict)
    """Tool -> the limit of its results, in place of `default_result_size`."""
    as_json: bool = False
    """Whether the model reads every result as a JSON object."""

    def limit(self, tool: str) -> float:
        """The limit of one result of a tool."""
        return float("inf") if tool in UNLIMITED else self.tool_overrides.get(tool, self.default_result_size)

    async def apply(
        self, calls: Sequence[tuple[str, str]], results: Sequence[ToolResult], session: ToolSession | None
    ) -> list[ToolResult]:
        """The results of one turn, within the budget.

        Args:
            calls: the id and the tool of each call.
            results: in the order of the calls.
            session: its sandbox keeps what is too long. None where the agent has no tool that reads there: what is
                too long then loses its middle.

        Raises:
            BackendError: the sandbox failed.
        """
        kept = list(results)
        persisted = {at for at, (_, tool) in enumerate(calls) if len(kept[at].content) > self.limit(tool)}
        for at in persisted:
            kept[at] = await self._persisted(calls[at][0], kept[at], session)
        while sum(len(result.content) for result in kept) > self.turn_budget and len(persisted) < len(kept):
            longest = max(set(range(len(kept))) - persisted, key=lambda at: len(kept[at].content))
            persisted.add(longest)
            shorter = await self._persisted(calls[longest][0], kept[longest], session)
            if len(shorter.content) >= len(kept[longest].content):
                break  # so are all that are left
            kept[longest] = shorter
        if self.as_json:
            return [
                replace(each, content=as_json(tool, each.content)) for (_, tool), each in zip(calls, kept, strict=True)
            ]
        return kept

    async def _persisted(self, call_id: str, result: ToolResult, session: ToolSession | None) -> ToolResult:
        text = result.content
        shown, _ = cap_text(text, self.preview_size)
        where = "and is too long to be shown; its middle is missing below."
        try:
            if session is not None:
                path = await _write(call_id, text, session)
                shown = text[: self.preview_size]
                where = f"and is too long to be shown. It is in the file {path}. It begins:"
        except OSError as error:  # the agent filled the disk, or put something in the folder's place
            where = f"and could not be written to a file ({error.strerror or error}); its middle is missing below."
        content = f"<{TAG}>\nThe result has {len(text)} characters {where}\n\n{shown}\n</{TAG}>"
        return replace(result, content=content, truncated=True)


async def _write(call_id: str, text: str, session: ToolSession) -> str:
    sandbox = await session.sandbox()
    done = await sandbox.exec('printf %s "${TMPDIR:-/tmp}"', timeout=30, fresh=True)  # without walls it is its own
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", call_id).lstrip(".")[:128] or "result"
    content = text.encode(errors="replace")
    digest = hashlib.sha256(content).hexdigest()[:8]  # two loops of one task may have calls of the same id
    path = f"{done.stdout.decode()}/{FOLDER}/{name}-{digest}.txt"
    await sandbox.write_bytes(path, content)
    return path
