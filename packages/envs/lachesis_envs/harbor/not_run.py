"""Whether tests could not run: they often download what runs them, and write 0 where that fails."""

from __future__ import annotations

import re

_FAILED = re.compile(
    r"could not resolve|temporary failure (in name )?resol|name or service not known|network is unreachable"
    r"|failed to (connect|fetch|download)|unable to (fetch|locate|connect|resolve)|connection (refused|timed out|reset)"
    r"|no matching distribution found|error sending request|getaddrinfo|ENOTFOUND|EAI_AGAIN",
    re.IGNORECASE,
)
_PROGRAM = re.compile(r"(?:^|\s)([\w./+-]+): (?:command )?not found", re.MULTILINE)
_RUNNER = re.compile(
    r"\b(uvx?|pip3?|pytest): (?:command )?not found|No module named '?(pytest|pip|uv)\b|No (interpreter) found"
    r"|error sending request.{0,500}(python)-build-standalone|Failed to fetch.{0,500}/simple/(pytest)\b"
)
_RAN = re.compile(r"\b\d+ (?:passed|failed)\b.{0,200} in \d|^Ran \d+ tests? in ", re.MULTILINE)


def not_run(output: str) -> set[str]:
    """What tests lack by their output: what runs them, and any program where a download failed. Nothing where they have
    run all the same, with what the image has."""
    if _RAN.search(output):
        return set()
    found = {"".join(filter(None, match.groups())) for match in _RUNNER.finditer(output)}
    return found | set(_PROGRAM.findall(output)) if _FAILED.search(output) else found
