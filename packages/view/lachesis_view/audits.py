"""Files of `lachesis audit --json`, as the page of audits shows them: environments by findings."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lachesis_messages.errors import MISSHAPEN
from lachesis_view.rows import parsed

SCHEMA = b'"lachesis.audit/1"'
MANY, LARGE = 1000, 32 << 20
"""Files that are read, and the bytes of one."""
SEVERITIES = ("error", "warning", "note")


def audits_below(path: Path) -> dict[str, Any]:
    """The audits of a file, or of the .json files below a folder, the worst first, and the codes that they have."""
    found = []
    below = sorted(filter(Path.is_file, path.rglob("*.json"))) if path.is_dir() else [path]  # a FIFO would hang it
    for file in below[:MANY]:
        with suppress(OSError, *MISSHAPEN):
            with file.open("rb") as opened:
                if SCHEMA not in opened.read(256) or file.stat().st_size > LARGE:
                    continue
            found.append(_audit(parsed(file.read_bytes())))
    found.sort(key=lambda each: [-len(each["by_severity"][severity]) for severity in SEVERITIES])
    codes = {code: rank for each in reversed(found) for code, rank in each["worst"].items()}
    return {"audits": found, "codes": sorted(codes, key=lambda code: (SEVERITIES.index(codes[code]), code))}


def _audit(record: Mapping[str, Any]) -> dict[str, Any]:
    findings = [{**each, "severity": str(each["severity"])} for each in record["findings"]]
    by_severity = {severity: [each for each in findings if each["severity"] == severity] for severity in SEVERITIES}
    rewards: dict[str, list[float]] = {}
    for play in record["plays"]:
        if play["reward"] is not None:
            rewards.setdefault(str(play["policy"]), []).append(float(play["reward"]))
    return {
        **{name: record[name] for name in ("environment", "items", "not_audited", "not_looked_at", "versions")},
        "findings": findings,
        "explained": dict(record.get("explained") or {}),
        "by_severity": by_severity,
        "worst": {each["code"]: each["severity"] for each in reversed(findings)},
        "rewards": [(name, len(of), sum(of) / len(of), max(of)) for name, of in rewards.items()],
        "rollouts": len(record["plays"]),
    }
