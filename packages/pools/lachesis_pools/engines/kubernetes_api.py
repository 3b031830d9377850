"""The API server of Kubernetes as far as workers need it, and what its objects say."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from backends.errors import BackendError, BackendUnavailable

CLAIMS = "sandboxclaims"
CLAIMS_API = "extensions.agents.x-k8s.io/v1beta1"
_HERE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_WAITS = (0.2, 0.4, 0.8, 1.6)
"""Seconds before a request is sent again."""
_NO_CLAIM = {"WarmPoolNotFound", "TemplateNotFound", "InvalidMetadata", "ClaimExpired", "SandboxExpired"}
_STEPS = {
    401: "log in as for kubectl, or give another --engine-option context",
    403: "give the account the Role of docs/pools.md, or raise the quota",
    404: "create the namespace, or install the CRDs of agent-sandbox",
}


class Cluster:
    """The objects of a namespace. All kinds are asked for in one way, which the client's classes do not have."""

    def __init__(self, kubeconfig: str, context: str, namespace: str) -> None:
        self._place = {"config_file": kubeconfig or None, "context": context or None}
        self.namespace = namespace
        self._api: Any = None
        self._connecting = asyncio.Lock()

    async def ask(
        self, method: str, plural: str, name: str = "", *, body: Any = None, once: bool = False, **query: object
    ) -> Any:
        """The answer. None if there is no object of the name, or for POST, if there is one already.

        Raises:
            BackendError: the server refuses, or has not answered. `once` asks it no second time.
        """
        await self._connect()
        from kubernetes_asyncio.client.exceptions import ApiException

        root = f"/apis/{CLAIMS_API}" if plural == CLAIMS else "/api/v1"
        path = f"{root}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")
        for wait in (None,) if once else (*_WAITS, None):
            status = 0
            try:
                return await self._api.call_api(
                    path,
                    method,
                    query_params=[*query.items()],
                    header_params={"Accept": "application/json", "Content-Type": "application/json"},
                    body=body,
                    response_types_map=dict.fromkeys((200, 201, 202), "object"),
                    auth_settings=["BearerToken"],
                    _return_http_data_only=True,
                    _request_timeout=30.0,
                )
            except ApiException as error:
                status, reason, said = error.status, *_read(error)
                if (status == 404 and name) or reason == "AlreadyExists":
                    return None
                passes = status in (401, 429) or status >= 500 or reason == "Conflict"  # quotas have conflicts
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                passes, said = True, str(error) or type(error).__name__
            if status == 401:  # the credentials of a plugin end after some minutes
                await self._log_in(self._api.configuration)
            if not passes or wait is None:
                break
            await asyncio.sleep(wait)
        step = _STEPS.get(status, f"kubectl -n {self.namespace} get {plural}")
        raise BackendError(f"Kubernetes: {method} {plural}/{name} failed: {said[:500]}. Next step: {step}")

    async def last_words(self, pod: str, **query: object) -> str:
        """The last line of a pod's log, after a colon; empty if there is none."""
        try:
            said = await self.ask("GET", "pods", f"{pod}/log", once=True, tailLines=1, **query)
        except BackendError:  # it has not run, or its node does not answer
            return ""
        return f": {str(said).strip()[:500]}" if said else ""

    async def _connect(self) -> None:
        try:
            from kubernetes_asyncio.client import ApiClient, Configuration
        except ImportError as error:
            step = "pip install 'lachesis-rl[kubernetes]'"
            raise BackendUnavailable(f"engine 'kubernetes' needs its client ({error}): {step}") from None
        async with self._connecting:
            if self._api is None:
                configuration = Configuration()
                configuration.connection_pool_maxsize = 16
                await self._log_in(configuration)
                self._api = ApiClient(configuration)

    async def _log_in(self, configuration: Any) -> None:
        from kubernetes_asyncio import config

        try:
            if any(self._place.values()) or "KUBERNETES_SERVICE_HOST" not in os.environ:
                loaded = await config.load_kube_config(client_configuration=configuration, **self._place)
                there = (loaded.current_context or {}).get("context", {}).get("namespace")
            else:
                config.load_incluster_config(configuration)  # type: ignore[no-untyped-call]
                there = _HERE.read_text().strip()
        except Exception as error:  # of a file, or of a plugin that it names
            step = "kubectl get pods, or --engine-option kubeconfig=FILE"
            raise BackendUnavailable(f"no cluster can be reached by a kubeconfig: {error}. Next step: {step}") from None
        self.namespace = self.namespace or there or "default"

    async def close(self) -> None:
        if self._api is not None:
            await self._api.close()
            self._api = None


def _read(error: Any) -> tuple[str, str]:
    """The reason and the message of a Status."""
    try:
        status = json.loads(error.body)
        return status.get("reason", ""), status.get("message", "")
    except (TypeError, ValueError, AttributeError):
        return "", f"{error.status} {error.reason} {error.body or ''}"


async def all_of(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Await all, also when one fails: what is cancelled on its way may be carried out yet."""
    for done in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(done, BaseException):
            raise done


def why_ended(of: Mapping[str, Any]) -> str:
    """Why a pod or a claim has ended; empty if it has not, as while it waits for a node."""
    status: Mapping[str, Any] = of.get("status", {})
    for each in status.get("conditions", []):  # a claim may be Ready without a pod: that it is, is not believed
        lost = each["type"] == "Ready" and each["status"] == "False" and each.get("reason") in _NO_CLAIM
        if lost or (each["type"] in ("Finished", "DisruptionTarget") and each["status"] == "True"):
            return _said(each)
    if status.get("phase") == "Failed" and status.get("reason"):  # it was evicted, or its node is lost
        return _said(status)
    if "deletionTimestamp" in of["metadata"]:
        return "somebody deletes it"
    for each in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waits, ended = each["state"].get("waiting", {}), each["state"].get("terminated")
        if waits.get("reason", "ContainerCreating") not in ("ContainerCreating", "PodInitializing"):
            return _said(waits)
        if ended and each["name"] == of["spec"]["containers"][0]["name"]:
            return f"exit code {ended['exitCode']}, {_said(ended)}"
    return f"its phase is {status['phase']}" if status.get("phase") in ("Failed", "Succeeded") else ""


def _said(of: Mapping[str, Any]) -> str:
    return ": ".join(filter(None, (of.get("reason"), of.get("message"))))[:500]


def merged(of: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Both, at all depths; of two lists or values, the second one."""
    both = dict(of)
    for key, value in more.items():
        nested = isinstance(value, Mapping) and isinstance(of.get(key), Mapping)
        both[key] = merged(of[key], value) if nested else value
    return both


def template(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """The metadata and the spec of a pod, as given or in a YAML file."""
    found: Any = given or {}
    if isinstance(found, str):
        import yaml

        try:
            found = yaml.safe_load(Path(found).expanduser().read_text())
        except (OSError, yaml.YAMLError) as error:
            raise BackendError(f"the template of a pod cannot be read: {error}") from None
    if not isinstance(found, Mapping) or found.keys() - {"apiVersion", "kind", "metadata", "spec"}:
        raise BackendError(f"{given!r} is no template of a pod. Next step: give it `metadata` and `spec`, nothing else")
    return {key: value for key, value in found.items() if key in ("metadata", "spec")}
