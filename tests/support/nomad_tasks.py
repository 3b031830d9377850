"""Tasks of a fake Nomad, as processes of this machine, with the events that a node tells of them; and its answers."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BODIES = {
    name: each["body"]
    for name, each in json.loads(Path(__file__).with_name("entries").joinpath("nomad_bodies.json").read_text()).items()
}
"""What Nomad answers. The file names the source of each."""
_TEMPLATE = re.compile(r'\{\{ with nomadVar "(.+?)" \}\}(\w+)=\{\{ \.(\w+)\.Value \| toJSON \}\}\{\{ end \}\}\n')


@dataclass
class Refused(Exception):
    """An error as the answer. The test fails, unless a right client may get it."""

    status: int
    text: str
    right: bool = False


class Allocation:
    """The only task of the only group of a job, once it was placed.

    Args:
        ids: fields of its body.
        variables: of Nomad, by path.
        unpullable: images that no node gets.
        ended: called when it has ended.
    """

    def __init__(
        self,
        job: dict[str, Any],
        ids: Mapping[str, Any],
        folder: Path,
        variables: Mapping[str, Mapping[str, str]],
        unpullable: Collection[str],
        ended: Callable[[], None],
    ) -> None:
        self.job, [self.group] = job, job["TaskGroups"]
        [self.task] = self.group["Tasks"]
        self._variables, self._unpullable, self._at_end = variables, unpullable, ended
        self.body = copy.deepcopy(BODIES["allocation"])
        self._event = next(iter(self.body.pop("TaskStates").values()))["Events"][0]
        self.body |= {
            **ids,
            "JobID": job["ID"],
            "Name": f"{job['ID']}.{self.group['Name']}[0]",
            "ClientStatus": "pending",
        }
        self._events: list[dict[str, Any]] = []
        self.state = {"State": "pending", "Failed": False, "Restarts": 0, "Events": self._events}
        self.body |= {"TaskGroup": self.group["Name"], "TaskStates": {self.task["Name"]: self.state}}
        self.log = folder / f"{self.body['ID']}.stderr"
        self.process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # it is started, or stopped before
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        return self.body["ClientStatus"] in ("complete", "failed", "lost", "unknown")

    @property
    def again(self) -> bool:
        """Whether Nomad places the task once more, which is what it does if nothing forbids it."""
        tries = (
            self.group.get("RestartPolicy", {}).get("Attempts", 3),
            self.group.get("ReschedulePolicy", {}).get("Attempts", 1),
        )
        return self.body["ClientStatus"] == "lost" or (self.body["ClientStatus"] == "failed" and any(tries))

    def _said(self, kind: str, words: str = "", **options: Any) -> None:
        text = BODIES["words"][words].format(**options) if words else kind
        event = {**self._event, "Type": kind, "DisplayMessage": text, "Time": time.time_ns()}
        self._events.append(event)

    def _end(self, status: str) -> None:
        self.state |= {"State": "dead", "Failed": status == "failed"}
        self.body["ClientStatus"] = status
        self._at_end()

    def _run(self) -> None:
        self._said("Received")
        self._said("Task Setup")
        config, image = self.task["Config"], self.task["Config"].get("image")
        if image in self._unpullable:
            self._said("Driver")
            self._said("Driver Failure", "pull", image=image)
            self._said("Not Restarting", "not restarting")
            return self._end("failed")
        words = [*config.get("entrypoint", []), *([config["command"]] if "command" in config else []), *config["args"]]
        if words[:2] == ["apptainer", "exec"]:
            words = words[3:]
        env = {key: value for key, value in os.environ.items() if not key.startswith(("LACHESIS_POOL_", "NOMAD_"))}
        env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **self.task.get("Env", {})}
        while (rendered := self._rendered()) is None:  # as Nomad does until the variable is there
            if self.body["DesiredStatus"] == "stop":
                return self._end("complete")
            time.sleep(0.02)
        with self._lock, self.log.open("wb") as log:
            if self.body["DesiredStatus"] != "stop":
                self.process = subprocess.Popen(
                    words, env={**env, **rendered}, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
                )
                self._said("Started", "started")
                self.state["State"] = self.body["ClientStatus"] = "running"
        if self.process is None:
            return self._end("complete")
        code = self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.ended:  # with its node
            return None
        stopped = self.body["DesiredStatus"] == "stop"
        self._said(
            "Terminated", "signalled" if code < 0 else "terminated", code=128 - code if code < 0 else code, signal=-code
        )
        self._said(*(("Killed", "killed") if stopped else ("Not Restarting", "not restarting")))
        self._end("failed" if code and not stopped else "complete")
        return None

    def _rendered(self) -> dict[str, str] | None:
        found = {}
        for template in self.task.get("Templates", []):
            path, name, key = _TEMPLATE.fullmatch(template["EmbeddedTmpl"]).groups()  # type: ignore[union-attr]
            # The identity of a task reads what is named after its job, and no other variable.
            if path != f"nomad/jobs/{self.job['ID']}" or path not in self._variables:
                return None
            found[name] = self._variables[path][key]
        return found

    def stop(self) -> None:
        with self._lock:
            if self.ended or self.body["DesiredStatus"] == "stop":
                return
            self.body |= {"DesiredStatus": "stop", "DesiredDescription": BODIES["words"]["stopped"]}
            seconds = self.task["KillTimeout"] / 10**9
            self._said("Killing", "killing", seconds=f"{seconds:g}")
        if self.process is not None:
            self.process.send_signal(signal.Signals[self.task["KillSignal"]])
            timer = threading.Timer(seconds, self.kill)
            timer.daemon = True
            timer.start()

    def kill(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def lose(self, status: str) -> None:
        """Its node is gone."""
        if status == "unknown":
            self.body["ClientDescription"] = BODIES["words"]["unknown"]
        else:
            self.body |= {"DesiredStatus": "stop", "DesiredDescription": BODIES["words"]["lost"]}
        self._end(status)
        self.kill()


def stub(job: dict[str, Any], placed: Collection[Allocation]) -> dict[str, Any]:
    """A job as in a list of jobs."""
    made, states = copy.deepcopy(BODIES["stub"]), [each.body["ClientStatus"] for each in placed]
    counts = dict.fromkeys(next(iter(made["JobSummary"]["Summary"].values())), 0)
    for each in states:
        counts["Starting" if each == "pending" else each.capitalize()] += 1
    counts["Queued"] = int(all(each.again for each in placed))
    status = "pending" if counts["Queued"] else "dead"
    if {*states} & {"pending", "running", "unknown"}:
        status = "running"
    made["JobSummary"] |= {"JobID": job["ID"], "Summary": {job["TaskGroups"][0]["Name"]: counts}}
    return {**made, **{key: job[key] for key in ("ID", "Name", "Type", "CreateIndex")}, "Status": status}


def blocked(job: dict[str, Any], misfit: str, index: int) -> dict[str, Any]:
    """The evaluation of a job that the only node does not fit, or has no room for."""
    metric = {**BODIES["metric"], "NodesEvaluated": 1, "NodesAvailable": {"dc1": 1}}
    if misfit:
        metric |= {"NodesFiltered": 1, "ConstraintFiltered": {misfit: 1}}
    else:
        metric |= {"NodesExhausted": 1, "DimensionExhausted": {"memory": 1}}
    failed = {"FailedTGAllocs": {job["TaskGroups"][0]["Name"]: metric}, "ModifyIndex": index}
    return {**BODIES["evaluation"], "Type": "batch", "JobID": job["ID"], "Status": "blocked", **failed}


def unknown_fields(kind: str, given: dict[str, Any]) -> list[str]:
    """What Nomad does not know of a job, or of a part of one."""
    fields = BODIES["fields"]
    found = [f"{kind}.{key}" for key in given if key not in fields[kind]]
    for key, value in given.items():
        known = f"Config of {given['Driver']}" if key == "Config" else key
        parts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, dict)]
        found += [name for each in parts if known in fields for name in unknown_fields(known, each)]
    return found
