"""A fake agent of Nomad on loopback, which runs the tasks of jobs as processes of this machine.

    with NomadServer(folder) as nomad:
        pool_engine(..., "--engine", "nomad", env=nomad.env)

The bodies that it answers are in `entries/nomad_bodies.json`, each with its source. What it does not know, it refuses,
and leaving it fails then. Of a docker or apptainer task, it runs the container's command; of templates, it knows those
that make variables of the environment of one variable of Nomad.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import threading
import time
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.nomad_tasks import BODIES, Allocation, Refused, blocked, stub, unknown_fields


@dataclass
class Fault:
    """Of calls that begin with `call`: a pause, then this answer or the right one. What is `lost` is done, not said."""

    call: str
    status: int = 0
    text: str = ""
    times: int = 1
    lost: bool = False
    stall: float = 0.0


class NomadServer:
    """An agent that is server and node at once. It has `room` for so many tasks; `misfit` excludes the node."""

    def __init__(self, folder: Path, token: str = "of-the-tests") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.token = folder, token
        self.jobs: dict[str, dict[str, Any]] = {}
        self.variables: dict[str, dict[str, str]] = {}
        self.allocations: list[Allocation] = []
        self.evaluations: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.refused: list[str] = []
        self.faults: list[Fault] = []
        self.unpullable: set[str] = set()
        self.room, self.misfit = 1000, ""
        self.next = itertools.count(100).__next__
        self._lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"nomad": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self.env = {"NOMAD_ADDR": f"http://127.0.0.1:{self._http.server_address[1]}", "NOMAD_TOKEN": token}

    def __enter__(self) -> NomadServer:
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        for each in self.allocations:
            each.kill()
        assert not self.refused, self.refused

    def of(self, job: str) -> list[Allocation]:
        """What was placed of the jobs of an ID."""
        return [each for each in self.allocations if each.job["ID"] == job]

    def schedule(self) -> None:
        """Place what can be placed."""
        with self._lock:
            for name, job in self.jobs.items():
                if any(each.job is job and not each.again for each in self.of(name)):
                    continue
                full = sum(not each.ended for each in self.allocations) >= self.room
                if full or self.misfit:
                    self.evaluations[name] = [blocked(job, self.misfit, self.next())]
                    continue
                ids = {"ID": str(uuid.uuid4()), "CreateIndex": self.next()}
                about = self.folder, self.variables, self.unpullable, self.schedule
                self.allocations.append(Allocation(job, ids, *about))

    # what is asked

    def answer(self, call: str, path: str, query: dict[str, str], body: Any) -> Any:
        for pattern, (name, *known) in BODIES["calls"].items():
            if found := re.fullmatch(pattern, f"{call} {path}"):
                if unknown := {*query} - {*known, "namespace", "region"}:
                    raise Refused(400, f"{call} {path} has no {unknown}")
                given = [unquote(each) for each in found.groups()] + ([body] if body is not None else [])
                with self._lock:
                    return getattr(self, f"_{name}")(*given, query)
        raise Refused(404, f"there is no {call} {path}")

    def _leader(self, query: dict[str, str]) -> Any:
        return BODIES["leader"]

    def _jobs(self, query: dict[str, str]) -> Any:
        found = [job for name, job in sorted(self.jobs.items()) if name.startswith(query["prefix"])]
        return [stub(job, [each for each in self.of(job["ID"]) if each.job is job]) for job in found]

    def _register(self, body: Any, query: dict[str, str]) -> Any:
        job = body["Job"]
        if unknown := unknown_fields("Job", job):
            raise Refused(400, f"a job has no {unknown}")
        old = self.jobs.get(job["ID"])
        if old is None:
            self.jobs[job["ID"]] = {**job, "CreateIndex": self.next()}
        elif job != {key: value for key, value in old.items() if key != "CreateIndex"}:
            raise Refused(400, f"job {job['ID']} is registered again, with other content")
        self.schedule()
        return BODIES["registered"]

    def _job(self, id: str, query: dict[str, str]) -> Any:
        if id in self.jobs:
            return self.jobs[id]
        raise Refused(404, BODIES["errors"]["no job"], right=True)

    def _deregister(self, id: str, query: dict[str, str]) -> Any:
        self.jobs.pop(id, None)
        for each in self.of(id):
            each.stop()
        return BODIES["deregistered"]

    def _job_allocations(self, id: str, query: dict[str, str]) -> Any:
        return [each.body for each in self.of(id)]

    def _job_evaluations(self, id: str, query: dict[str, str]) -> Any:
        return self.evaluations.get(id, [])

    def _allocation(self, id: str, query: dict[str, str]) -> Any:
        if found := [each.body for each in self.allocations if each.body["ID"] == id]:
            return found[0]
        raise Refused(404, BODIES["errors"]["no allocation"], right=True)

    def _logs(self, id: str, query: dict[str, str]) -> Any:
        if (log := self.folder / f"{id}.stderr").exists():
            return log.read_bytes()[-int(query["offset"]) :]
        raise Refused(404, BODIES["errors"]["no logs"].format(task=query["task"]), right=True)

    def _variable_list(self, query: dict[str, str]) -> Any:
        kept = {key: value for key, value in BODIES["variable"].items() if key != "Items"}
        return [{**kept, "Path": path} for path in sorted(self.variables) if path.startswith(query["prefix"])]

    def _put_variable(self, path: str, body: Any, query: dict[str, str]) -> Any:
        if not re.fullmatch(r"[a-zA-Z0-9-_~/]{1,128}", path) or {*body} != {"Path", "Items"}:
            raise Refused(400, BODIES["errors"]["path"].format(path=path))
        self.variables[path] = body["Items"]
        return {**BODIES["variable"], "Path": path, "Items": body["Items"]}

    def _delete_variable(self, path: str, query: dict[str, str]) -> Any:
        self.variables.pop(path, None)
        return b""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    nomad: NomadServer

    def _serve(self) -> None:
        nomad, url = self.nomad, urlsplit(self.path)
        said = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        call = f"{self.command} {url.path}"
        nomad.requests.append(call)
        fault = next((each for each in nomad.faults if each.times > 0 and call.startswith(each.call)), Fault(""))
        fault.times -= 1
        time.sleep(fault.stall)
        status, answer = fault.status, fault.text.encode()
        try:
            if self.headers.get("X-Nomad-Token") != nomad.token:
                status, answer = 403, BODIES["errors"]["forbidden"].encode()
            elif not status:
                made = nomad.answer(self.command, url.path, dict(parse_qsl(url.query)), json.loads(said or "null"))
                status, answer = 200, made if isinstance(made, bytes) else json.dumps(made).encode()
        except Refused as error:
            nomad.refused += [] if error.right else [error.text]
            status, answer = error.status, error.text.encode()
        if fault.lost:
            self.close_connection = True
            return
        with contextlib.suppress(ConnectionError):  # it has waited long enough
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None: ...
