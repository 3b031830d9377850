"""What happens in a Kubernetes behind its API: pods become processes of this machine, and claims get warm pods.

States are those of "PodStatus v1 core" in the API reference v1.36, reasons those of pkg/kubelet/images/types.go. The
controllers of agent-sandbox are as in kubernetes-sigs/agent-sandbox v0.5.6: sandboxclaim_controller.go
(`validateAdditionalPodMetadata`, `computeReadyCondition`) and sandbox_controller.go (`updatePodMetadata`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import sys
from collections.abc import Coroutine
from copy import deepcopy
from pathlib import Path
from typing import Any

NOW = "2026-11-28T10:00:00Z"
WARM = "agents.x-k8s.io/warm-pool-sandbox"
_VALUE = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]")
_VARIABLE = re.compile(r"\$(?:\$|\((.*?)\))")
_ROOM = "0/1 nodes are available: 1 Insufficient cpu. preemption: 0/1 nodes are available."


class Nodes:
    """The objects of a namespace, and what runs for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.placing = ""
        """What happens to new pods: `image` (it cannot be pulled), `room` (there is none)."""
        self.exits: dict[str, int] = {}
        """The exit codes of pods."""
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def of(self, plural: str) -> dict[str, dict[str, Any]]:
        return {name: each for (kind, name), each in self.objects.items() if kind == plural}

    async def created(self, plural: str, body: dict[str, Any]) -> dict[str, Any]:
        """It is in the API; what comes of it goes on."""
        meta = body["metadata"]
        meta |= {"uid": secrets.token_hex(16), "creationTimestamp": NOW, "resourceVersion": "1"}
        self.objects[plural, meta["name"]] = body
        if plural == "pods":
            body["status"] = {"phase": "Pending"}
            (self.folder / meta["name"] / "log").unlink(missing_ok=True)  # of one of the same name
            self._begin(self._place(body))
        elif plural == "sandboxwarmpools":
            for _ in range(body["spec"].get("replicas", 1)):
                await self._warm(body)
        elif plural == "sandboxclaims":
            self._begin(self._claim(body))
        return body

    async def removed(self, plural: str, name: str, grace: float = 30.0) -> None:
        """SIGTERM first; it is in the API until it has ended."""
        of = self.objects[plural, name]
        of["metadata"].setdefault("deletionTimestamp", NOW)
        pod = of.get("status", {}).get("sandbox", {}).get("name") if plural == "sandboxclaims" else None
        if pod and ("pods", pod) in self.objects:
            await self.removed("pods", pod)
        if plural == "pods" and name in self._processes:
            process = self._processes.pop(name)
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace)
            self._kill(process)
        if self.objects.get((plural, name)) is of:
            del self.objects[plural, name]

    def remove(self, plural: str, name: str, grace: float, *, background: bool) -> None:
        """In the background, the owner of a pod goes before it."""
        if "deletionTimestamp" in self.objects[plural, name]["metadata"]:
            return
        self._begin(self.removed(plural, name, grace))
        if background and plural == "sandboxclaims":
            self._begin(self._forget(plural, name))

    async def _forget(self, plural: str, name: str) -> None:
        self.objects.pop((plural, name), None)

    async def drain(self, pod: str) -> None:
        """Evict it from its node. One of a claim is made again, with its metadata, and its claim stays Ready."""
        gone = deepcopy(self.objects["pods", pod])
        await self.removed("pods", pod)
        claims = self.of("sandboxclaims").values()
        if any(each["status"].get("sandbox") == {"name": pod} for each in claims if "status" in each):
            del gone["status"]
            await self.created("pods", gone)

    async def evict(self, pod: str) -> None:
        """The kubelet ends it for want of memory."""
        said = {"reason": "Evicted", "message": "The node was low on resource: memory."}
        self.objects["pods", pod]["status"] = {"phase": "Failed", **said}
        self._kill(self._processes[pod])

    async def kill(self, pod: str) -> None:
        self._kill(self._processes[pod])

    def pid(self, pod: str) -> int:
        return self._processes[pod].pid

    def log(self, pod: str) -> str | None:
        path = self.folder / pod / "log"
        return path.read_text() if path.exists() else None

    async def stop(self) -> None:
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for process in self._processes.values():
            self._kill(process)
            await process.wait()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(self._tasks.discard)

    def _kill(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    # the kubelet

    async def _place(self, pod: dict[str, Any]) -> None:
        name, container = pod["metadata"]["name"], pod["spec"]["containers"][0]
        sources = [each.get("valueFrom", {}).get("secretKeyRef") for each in container.get("env", [])]
        missing = [each["name"] for each in sources if each and ("secrets", each["name"]) not in self.objects]
        if self.placing == "room":
            pod["status"]["conditions"] = [_condition("PodScheduled", "False", "Unschedulable", _ROOM)]
            return
        if self.placing == "image" or missing:
            said = f'secret "{missing[0]}" not found' if missing else f'Back-off pulling image "{container["image"]}"'
            reason = "CreateContainerConfigError" if missing else "ImagePullBackOff"
            self._container(pod, "Pending", {"waiting": {"reason": reason, "message": said}})
            return
        (folder := self.folder / name).mkdir(exist_ok=True)
        env = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        for each, source in zip(container.get("env", []), sources, strict=True):
            env[each["name"]] = self._secret(source) if source else each["value"]
        self._write_down(pod)
        words = [*container.get("command", []), *container.get("args", [])]
        words = [
            sys.executable if word == "python3" else _VARIABLE.sub(lambda of: _expanded(of, env), word)
            for word in words
        ]
        for mount in container.get("volumeMounts", []):
            words = [word.replace(mount["mountPath"], str(folder / mount["name"])) for word in words]
        with (folder / "log").open("wb") as log:
            process = self._processes[name] = await asyncio.create_subprocess_exec(
                *words, env=env, cwd=folder, stdout=log, stderr=log, start_new_session=True
            )
        self._container(pod, "Running", {"running": {"startedAt": NOW}})
        code = self.exits[name] = await process.wait()
        self._kill(process)
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]:
            ended = {"exitCode": code if code >= 0 else 128 - code, "reason": "Error" if code else "Completed"}
            self._container(pod, "Failed" if code else "Succeeded", {"terminated": ended})
            for claim in self.of("sandboxclaims").values():
                if claim.get("status", {}).get("sandbox") == {"name": name}:
                    said = {"reason": "PodFailed" if code else "PodSucceeded", "message": "Pod has ended"}
                    claim["status"]["conditions"].append(_condition("Finished", "True", **said))

    def _secret(self, source: dict[str, str]) -> str:
        value: str = self.objects["secrets", source["name"]]["stringData"][source["key"]]
        return value

    def _container(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        of = pod["spec"]["containers"][0]
        facts = {"name": of["name"], "image": of["image"], "imageID": "", "ready": "running" in state}
        pod["status"] = {"phase": phase, "containerStatuses": [{**facts, "restartCount": 0, "state": state}]}

    def _write_down(self, pod: dict[str, Any]) -> None:
        """The files of the downward API."""
        for volume in pod["spec"].get("volumes", []):
            for item in volume.get("downwardAPI", {}).get("items", []):
                part, key = _VALUE.fullmatch(item["fieldRef"]["fieldPath"]).groups()  # type: ignore[union-attr]
                path = self.folder / pod["metadata"]["name"] / volume["name"] / item["path"]
                path.parent.mkdir(exist_ok=True)
                path.write_text(pod["metadata"].get(part, {}).get(key, ""))

    # the controllers of agent-sandbox

    async def _warm(self, pool: dict[str, Any]) -> None:
        template = deepcopy(self.of("sandboxtemplates")[pool["spec"]["sandboxTemplateRef"]["name"]])
        body = template["spec"]["podTemplate"]
        labels = {**body.get("metadata", {}).get("labels", {}), WARM: pool["metadata"]["name"]}
        name = f"{pool['metadata']['name']}-{secrets.token_hex(3)}"
        await self.created("pods", {"metadata": {"name": name, "labels": labels}, "spec": body["spec"]})

    async def _claim(self, claim: dict[str, Any]) -> None:
        wanted = claim["spec"]["warmPoolRef"]["name"]
        pool, metadata = self.of("sandboxwarmpools").get(wanted), claim["spec"].get("additionalPodMetadata", {})
        claim["status"] = {"conditions": []}
        domains = {key.partition("/")[0] for key in metadata.get("labels", {})} - {"sandbox.users.io"}
        if domains or pool is None:
            said = f'label domain "{domains.pop()}" is not in the allowlist' if domains else ""
            said, reason = (
                said or f'SandboxWarmPool "{wanted}" not found',
                "InvalidMetadata" if said else "WarmPoolNotFound",
            )
            claim["status"]["conditions"].append(_condition("Ready", "False", reason, said))
            return
        while not (warm := [each for each in self.of("pods").values() if _is_warm(each, wanted)]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        pod = warm[0]
        del pod["metadata"]["labels"][WARM]
        pod["metadata"].setdefault("annotations", {}).update(metadata.get("annotations", {}))
        self._write_down(pod)
        ready = _condition("Ready", "True", "DependenciesReady", "Pod is Ready")
        claim["status"] = {"conditions": [ready], "sandbox": {"name": pod["metadata"]["name"]}}
        await self._warm(pool)


def _expanded(of: re.Match[str], env: dict[str, str]) -> str:
    """As third_party/forked/golang/expansion has it."""
    return "$" if of[0] == "$$" else env.get(of[1], of[0])


def _is_warm(pod: dict[str, Any], pool: str) -> bool:
    return pod["metadata"]["labels"].get(WARM) == pool and pod["status"]["phase"] == "Running"


def _condition(kind: str, status: str, reason: str, message: str) -> dict[str, Any]:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": NOW}
