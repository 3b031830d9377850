"""Workers as pods of Kubernetes: one pod a worker, or one claim on a warm pool of agent-sandbox.

No Deployment or Job makes them: its controller would start workers that the pool has given up, and would choose itself
which one goes when there are too many. The pool replaces what has ended, so no pod is started again either.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from backends.errors import BackendError
from lachesis_pools.engines.engine import WorkerCommand
from lachesis_pools.engines.kubernetes_api import CLAIMS, CLAIMS_API, Cluster, all_of, merged, template, why_ended
from lachesis_pools.wire import TOKEN

_START, _WORKER = "lachesis.dev/pool-start", "lachesis.dev/worker"
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_END = 30
"""Seconds that a worker has to end."""


class KubernetesEngine:
    """Workers that Kubernetes places."""

    name = "kubernetes"

    def __init__(
        self,
        worker: WorkerCommand,
        *,
        image: str = "",
        namespace: str = "",
        context: str = "",
        kubeconfig: str = "",
        cpu: float | str = "",
        memory: int | str = "",
        gpu: int | str = "",
        runtime_class: str = "",
        pod: Mapping[str, Any] | str = "",
        python: str = "python3",
        claims: str = "",
    ) -> None:
        """
        Args:
            image: of workers; it has lachesis-pools, and what the backend of their sandboxes needs.
            namespace: of all that is made. Default: that of the context.
            context: of the kubeconfig. Default: the current one; in a pod, its service account.
            kubeconfig: a file. Default: KUBECONFIG, or ~/.kube/config.
            cpu: processors of a worker; like `memory` (`64Gi`) and `gpu` (`nvidia.com/gpu`) reserved, and the limit.
            runtime_class: such as `gvisor`.
            pod: the template of a pod, or its YAML file, for all else; the worker's container is the first one.
            python: of the image.
            claims: a SandboxWarmPool, whose pods are claimed; its template says what they are.
        """
        self._worker, self._claims = replace(worker, python=python), claims
        self._plural = CLAIMS if claims else "pods"
        # A claim is there until its pod has ended.
        self._ending: dict[str, Any] = {"propagationPolicy": "Foreground"} if claims else {"gracePeriodSeconds": _END}
        self._cluster = Cluster(kubeconfig, context, namespace)
        amounts = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": gpu}
        limits = {name: str(amount) for name, amount in amounts.items() if amount != ""}
        mine = {"image": image, "resources": {"requests": limits, "limits": limits} if limits else {}}
        # Without a shared namespace of processes, the worker would be process 1, which has to wait for orphans.
        spec = {"shareProcessNamespace": True, "automountServiceAccountToken": False}
        self._pod = merged({"apiVersion": "v1", "kind": "Pod", "spec": spec}, template(pod))
        self._pod["spec"] |= {"restartPolicy": "Never"} | ({"runtimeClassName": runtime_class} if runtime_class else {})
        first, *others = self._pod["spec"].get("containers") or [{}]
        first = {"name": "worker", **merged(first, {key: value for key, value in mine.items() if value})}
        self._pod["spec"]["containers"] = [first, *others]
        self._first = {} if claims else {"container": first["name"]}
        if not claims and "image" not in first:
            raise BackendError("engine 'kubernetes' needs an image. Next step: --engine-option image=IMAGE")
        self._left: dict[str, set[str]] = {}
        """The workers of each start that were not stopped; its Secret goes with the last one."""

    async def start(self, base: str, count: int) -> str:
        """See `WorkerEngine.start`."""
        if not re.fullmatch(rf"{_LABEL}(\.{_LABEL})*", base) or len(base) > 63:
            step = "lachesis pool up --name with a-z, 0-9 and '-', at most 40 of them"
            raise BackendError(f"{base!r} cannot be the name of an object of Kubernetes. Next step: {step}")
        names = [f"{base}.{number}" for number in range(1, count + 1)]
        self._left[base] = {*names}
        if not self._claims:
            key = {"immutable": True, "stringData": {"token": self._worker.token}}
            await self._create("secrets", base, base, {"apiVersion": "v1", "kind": "Secret", **key})
        await all_of(self._create(self._plural, name, base, self._body(name, base)) for name in names)
        return ""

    def _body(self, name: str, base: str) -> dict[str, Any]:
        if self._claims:  # variables or volumes of its own would need a new pod
            return {
                "apiVersion": CLAIMS_API,
                "kind": "SandboxClaim",
                "spec": {
                    "warmPoolRef": {"name": self._claims},
                    "lifecycle": {"shutdownPolicy": "Delete", "ttlSecondsAfterFinished": 300},
                    # The controller takes labels of its own list of domains only.
                    "additionalPodMetadata": {"annotations": {_WORKER: name}},
                },
            }
        body = copy.deepcopy(self._pod)
        container = body["spec"]["containers"][0]
        container.pop("args", None)
        container["command"] = [word.replace("$", "$$") for word in self._worker.arguments(name)]
        key = {"name": TOKEN, "valueFrom": {"secretKeyRef": {"name": base, "key": "token"}}}
        container["env"] = [*container.get("env", []), key]
        return body

    async def _create(self, plural: str, name: str, base: str, body: dict[str, Any]) -> None:
        """One that is there already was made by a request whose answer was lost."""
        ours = {"name": name, "labels": {"app.kubernetes.io/name": "lachesis-pool-worker", _START: base}}
        body = {**body, "metadata": merged(body.get("metadata", {}), ours)}
        made = await self._cluster.ask("POST", plural, body=body)
        if made is None and plural != "secrets":  # to read secrets is more than a pool should be able to
            there = await self._cluster.ask("GET", plural, name) or {"metadata": ours}
            if there["metadata"].get("labels", {}).get(_START) != base:
                raise BackendError(f"{plural}/{name} is there, and not ours. Next step: kubectl delete {plural}/{name}")

    async def ended(self, names: Collection[str]) -> Mapping[str, str]:
        """See `WorkerEngine.ended`. They are removed as well: an image that is there after all would start one."""
        if not names:
            return {}
        bases = ",".join(sorted({_base(name) for name in names}))
        listed = await self._cluster.ask("GET", self._plural, once=True, labelSelector=f"{_START} in ({bases})")
        there = {each["metadata"]["name"]: each for each in listed["items"]}
        reasons = {name: why_ended(there[name]) if name in there else "somebody has deleted it" for name in names}
        found = {name: reason for name, reason in reasons.items() if reason}
        for name in found:
            claimed = there.get(name, {}).get("status", {}).get("sandbox", {}).get("name")
            found[name] += await self._cluster.last_words(claimed or name, **self._first)
        with contextlib.suppress(BackendError):
            await self.stop(found)
        return found

    async def stop(self, names: Collection[str]) -> None:
        """See `WorkerEngine.stop`."""
        await all_of(self._cluster.ask("DELETE", self._plural, name, **self._ending) for name in names)
        for name in names:
            left = self._left.get(_base(name), set())
            left.discard(name)
            if not left and self._left.pop(_base(name), None) is not None and not self._claims:
                await self._cluster.ask("DELETE", "secrets", _base(name))

    async def reap(self, base: str, note: str) -> None:
        """See `WorkerEngine.reap`: by the label, as requests may have been carried out without an answer."""
        ours = f"{_START}={base}"
        await self._cluster.ask("DELETE", self._plural, labelSelector=ours, **self._ending)
        if not self._claims:
            await self._cluster.ask("DELETE", "secrets", base)
        for _ in range(10 * _END):
            if not (await self._cluster.ask("GET", self._plural, labelSelector=ours))["items"]:
                return
            await asyncio.sleep(0.2)
        step = f"kubectl -n {self._cluster.namespace} get {self._plural} -l {ours}; is a node gone?"
        raise BackendError(f"{self._plural} of {base} do not end. Next step: {step}")

    async def close(self) -> None:
        """See `WorkerEngine.close`."""
        await self._cluster.close()


def _base(name: str) -> str:
    return name.rpartition(".")[0]
