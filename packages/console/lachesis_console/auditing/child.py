"""The process in which an audit plays one start of an environment.

It writes what it plays, line by line, into a file, so that nothing is lost when the environment ends the process.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from backends.errors import ExitCode, LachesisError


class Writer:
    """Lines of JSON, each written at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, event: str, **content: Any) -> None:
        self._file.write(json.dumps({"event": event, **content}, default=str) + "\n")
        self._file.flush()


async def play(job: dict[str, Any], writer: Writer) -> None:
    from lachesis.cli.environment_classes import environment_class
    from lachesis_console.auditing.plan import AuditPlan
    from lachesis_console.auditing.playing import Stage

    stage = Stage(
        environment_class(job["target"]),
        job["flags"],
        seconds=job["item_seconds"],
        began=lambda item, policy, block: writer.write("began", item=item, policy=policy, block=block),
        finished=lambda play: writer.write("play", play=play.to_record()),
    )
    async with stage.started(job["items"]):
        writer.write("facts", facts=asdict(stage.facts))
        plan = AuditPlan(stage, time.monotonic() + job["seconds"])
        await (plan.first_start(Path(job["block"])) if job["start"] == 1 else plan.second_start())
    writer.write("facts", facts=asdict(stage.facts))


def main(path: str) -> int:
    from lachesis.authors import place
    from lachesis.runs.own_process import run
    from lachesis.tracebacks import explained

    job = json.loads(Path(path).read_text())
    writer = Writer(Path(job["events"]))
    try:
        run(play(job, writer))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return ExitCode.STOPPED
    except Exception as error:
        said = str(error) if isinstance(error, LachesisError) else explained(error)
        where = "" if isinstance(error, LachesisError) else place(error)
        writer.write("stopped", said=f"{where}: {said}".removeprefix(": "))
        return ExitCode.FAILED
    writer.write("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
