"""Whether tests could not run for want of the network: they download what runs them, and often write 0 without it."""

from __future__ import annotations

import re

_FAILED = re.compile(
    r"could not resolve|temporary failure (in name )?resol|name or service not known|network is unreachable"
    r"|failed to (connect|fetch|download)|unable to (fetch|locate|connect|resolve)|connection (refused|timed out|reset)"
    r"|no matching distribution found|error sending request|getaddrinfo|ENOTFOUND|EAI_AGAIN",
    re.IGNORECASE,
)
_MISSING = (
    re.compile(r"(?:^|\s)([\w./+-]+): (?:command )?not found", re.MULTILINE),
    re.compile(r"No module named '?((?:pytest|pip|uv)\b[\w.]*)"),
    re.compile(r"No (interpreter) found"),
)


def unreachable(output: str) -> set[str]:
    """Programs that are missing in the output of tests, if a download failed there."""
    if not _FAILED.search(output):
        return set()
    return {match[1] for pattern in _MISSING for match in pattern.finditer(output)}
