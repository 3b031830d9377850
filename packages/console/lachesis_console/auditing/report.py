"""The audit of an environment: two processes play it, one after the other, and this one judges what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from lachesis.tool_context.own_folder import own_folder
from lachesis_console.auditing.findings import AuditFinding, Findings
from lachesis_console.auditing.of_environment import judge_environment
from lachesis_console.auditing.of_repetition import judge_repetition
from lachesis_console.auditing.of_rewards import Rewards
from lachesis_console.auditing.records import AuditPlay, EnvironmentFacts

SCHEMA: Final = "lachesis.audit/1"
INSIDE = Path(__file__).with_name("inside")
_GRACE = 45.0
"""Seconds beyond the limit of a rollout after which a process that says nothing is ended."""
_START = 900.0
"""Seconds that an environment may take to start."""


@dataclass(slots=True)
class Start:
    """What one process played."""

    plays: list[AuditPlay]
    facts: EnvironmentFacts | None = None
    stopped: str = ""
    """Why the environment did not start, or ended early."""
    ended_process: str = ""
    """How the process ended by itself, with the last rollout."""


@dataclass(slots=True)
class Audit:
    """The result."""

    target: str
    started: float
    seconds: float
    findings: Sequence[AuditFinding]
    plays: Sequence[AuditPlay]
    facts: EnvironmentFacts
    settings: dict[str, Any]
    not_audited: str = ""
    """Why there is none."""

    @property
    def exit_code(self) -> int:
        return 2 if self.not_audited else int(any(each.severity == "error" for each in self.findings))

    @property
    def explained(self) -> dict[str, str]:
        """What was done in plays whose name is a word for it, by that word."""
        played = {play.policy.partition(":")[0] for play in self.plays}
        return {word: said for word, said in EXPLAINED.items() if word in played}

    def to_record(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "environment": self.target,
            "versions": {"lachesis": version("lachesis-core"), **self.facts.versions},
            "started": datetime.fromtimestamp(self.started, UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "settings": {**self.settings, **self.facts.settings},
            "network_seen_by": "an audit hook in this Python process and in those that it started",
            "not_audited": self.not_audited,
            "not_looked_at": self.facts.left_out,
            "items": len(self.facts.digests),
            "findings": [each.to_record() for each in self.findings],
            "explained": self.explained,
            "plays": [
                {
                    **{name: getattr(play, name) for name in ("item", "policy", "block", "reward", "kind", "reason")},
                    "seconds": round(play.seconds, 3),
                    "memory_mib": round(play.memory),
                }
                for play in self.plays
            ],
        }


EXPLAINED = {
    "hollow": "the reference plays, then all values in its JSON files become one number; 1.000 is an error if it has "
    "such files, which a finding says, and else the reward of the reference",
    "emptied": "the files of the prompt lose their content before the reference plays; 1.000 says that it needs none, "
    "or that the reward takes what it expects from these files, which a finding says",
}
"""By the first word of a policy."""


def audit(
    target: str,
    flags: Sequence[str] = (),
    *,
    items: int = 8,
    item_seconds: float = 60.0,
    seconds: float = 600.0,
    context: int = 32768,
    progress: Callable[[str, int], None] = lambda said, played: None,
) -> Audit:
    """Play an environment without a model, and say what is wrong with it.

    Args:
        flags: settings as on the command line.
        item_seconds: the longest time of a rollout.
        seconds: the longest time of all; what is not played by then is named.
        context: tokens that a prompt may have.
    """
    began = time.time()
    with TemporaryDirectory(prefix="audit-", dir=own_folder()) as folder:
        given = {"target": target, "flags": list(flags), "items": items, "item_seconds": item_seconds}
        first = _played({**given, "start": 1, "seconds": 0.7 * seconds}, Path(folder, "1"), progress)
        second = Start([])
        if first.facts is not None and not first.ended_process:
            second = _played({**given, "start": 2, "seconds": 0.3 * seconds}, Path(folder, "2"), progress)
        network = _network(Path(folder, "1"))
    settings = {"items": items, "item_seconds": item_seconds, "seconds": seconds, "flags": list(flags)}
    facts = first.facts or EnvironmentFacts()
    if second.facts is not None:
        facts.left_out += [text for text in second.facts.left_out if text not in facts.left_out]
    findings = Findings()
    for start in (first, second):
        if start.ended_process:
            findings.add("ends-process", "error", start.ended_process)
    not_audited = "" if first.plays or first.ended_process else first.stopped or "it has no items"
    if first.plays:
        if second.facts is not None and second.facts.digests != facts.digests:
            findings.add("items-differ", "error", "a second start gives other items, or the same in another order")
            second.plays.clear()
        for line in facts.misspelt:
            findings.add("misspelt-hook", "warning", line)
        rewards = Rewards(first.plays, facts, findings)
        rewards.judge()
        judge_repetition(first.plays, second.plays, findings)
        judge_environment([*first.plays, *second.plays], facts, network, rewards, context=context)
        for start in (first, second):
            if start.stopped:
                findings.add("exception", "error", f"a start ended early: {start.stopped}")
    plays = [*first.plays, *second.plays]
    return Audit(target, began, time.time() - began, findings.sorted(), plays, facts, settings, not_audited)


def _network(folder: Path) -> list[dict[str, Any]]:
    path = folder / "network.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _played(job: dict[str, Any], folder: Path, progress: Callable[[str, int], None]) -> Start:
    """What a process of its own plays. It is ended when it says nothing for too long."""
    folder.mkdir()
    events, log = folder / "events.jsonl", folder / "log"
    (folder / "job.json").write_text(json.dumps({**job, "events": str(events), "block": str(folder / "block")}))
    path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH", "")]))
    given = {"LACHESIS_AUDIT_LOG": str(folder / "network.jsonl"), "LACHESIS_AUDIT_BLOCK": str(folder / "block")}
    command = [sys.executable, "-m", "lachesis_console.auditing.child", str(folder / "job.json")]
    zone = {"TZ": "Pacific/Kiritimati"} if job["start"] == 2 else {}  # what reads the local time differs
    begun = {**os.environ, **given, **zone, "PYTHONPATH": path}
    start, last, hung = Start([]), "its start", False
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=begun, start_new_session=True
        )
    ended, lines, heard = False, 0, time.monotonic()
    try:
        while True:
            alive = process.poll() is None
            read = events.read_text().split("\n")[:-1] if events.exists() else []
            for line in read[lines:]:
                heard = time.monotonic()
                event = json.loads(line)
                if event["event"] == "began":
                    last = f"{event['policy']} on item {event['item']}"
                    progress(last, len(start.plays))
                elif event["event"] == "play":
                    start.plays.append(AuditPlay(**event["play"]))
                elif event["event"] == "facts":
                    start.facts = EnvironmentFacts(**event["facts"])
                elif event["event"] == "stopped":
                    start.stopped, ended = event["said"], True
                else:
                    ended = True
            lines = len(read)
            if not alive:
                break
            limit = job["item_seconds"] + _GRACE if start.facts is not None else _START
            if time.monotonic() - heard > limit:
                hung = True
                break
            time.sleep(0.1)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not ended:
        said = log.read_text(errors="replace").strip()[-300:]
        how = f"it hangs in {last}" if hung else f"it ended the process with {process.returncode} in {last}"
        start.ended_process = f"{how}{': ' + said if said else ''}"
    return start
