"""An API server of Kubernetes on loopback, in front of pods that are processes of this machine.

Fields of bodies: Kubernetes API reference v1.36, by the types that kubernetes_asyncio 36 was generated with; those of
claims, warm pools and templates: kubernetes-sigs/agent-sandbox v0.5.6, extensions/api/v1beta1/*_types.go. Errors are
"Status v1 meta" of the reference, in the words of apimachinery/pkg/api/errors/errors.go. It refuses a request of which
it does not know all parts, and the test fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import threading
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web
from kubernetes_asyncio.client import models

from tests.support.kubernetes_nodes import Nodes

CLAIMS_API, NAMESPACE = "extensions.agents.x-k8s.io/v1beta1", "rl"
KINDS = {("v1", "pods"): "Pod", ("v1", "secrets"): "Secret", ("rbac.authorization.k8s.io/v1", "roles"): "Role"}
KINDS |= {(CLAIMS_API, f"{kind.lower()}s"): kind for kind in ("SandboxClaim", "SandboxWarmPool", "SandboxTemplate")}
TOP = {"apiVersion": "str", "kind": "str", "metadata": "V1ObjectMeta"}
TYPES: dict[str, dict[str, str]] = {
    "SandboxClaim": {**TOP, "spec": "ClaimSpec", "status": "ClaimStatus"},
    "ClaimSpec": {"warmPoolRef": "Ref", "lifecycle": "Lifecycle", "additionalPodMetadata": "PodMetadata"},
    "ClaimStatus": {"conditions": "list[V1Condition]", "sandbox": "SandboxStatus"},
    "SandboxStatus": {"name": "str", "podIPs": "list[str]"},
    "Ref": {"name": "str"},
    "Lifecycle": {"shutdownTime": "str", "ttlSecondsAfterFinished": "int", "shutdownPolicy": "str"},
    "PodMetadata": {"labels": "dict(str, str)", "annotations": "dict(str, str)"},
    "SandboxWarmPool": {**TOP, "spec": "WarmPoolSpec"},
    "WarmPoolSpec": {"replicas": "int", "sandboxTemplateRef": "Ref", "updateStrategy": "object"},
    "SandboxTemplate": {**TOP, "spec": "TemplateSpec"},
    "TemplateSpec": {"podTemplate": "Template", "networkPolicy": "Policy", "networkPolicyManagement": "str"},
    "Template": {"metadata": "PodMetadata", "spec": "V1PodSpec"},
    "Policy": {"egress": "list[V1NetworkPolicyEgressRule]", "ingress": "list[V1NetworkPolicyIngressRule]"},
}
VERBS = {"POST": ("create", ""), "GET": ("list", "get"), "DELETE": ("deletecollection", "delete")}
QUERIES = {"list": {"labelSelector"}, "log": {"container", "tailLines"}}
QUERIES["delete"] = {"gracePeriodSeconds", "propagationPolicy"}
QUERIES["deletecollection"] = QUERIES["delete"] | QUERIES["list"]
PATH = re.compile(r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>\w+)/namespaces/(?P<of>[^/]+)/(?P<plural>\w+)")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")


class Refused(Exception):
    def __init__(self, code: int, reason: str, message: str) -> None:
        status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code}
        self.code, self.body = code, {**status, "message": message, "reason": reason}


class Strange(Refused):
    """A request that no API server takes."""


@dataclass
class Fault:
    """What happens to the next requests of a kind. Without a code, the connection breaks."""

    verb: str
    plural: str
    code: int = 0
    reason: str = "InternalError"
    carried_out: bool = False
    times: int = 1


def check(value: Any, kind: str, where: str) -> None:
    """Refuse fields that the API does not have, and values of another type."""
    if match := re.fullmatch(r"list\[(.*)\]|dict\(str, (.*)\)", kind):
        for key, each in enumerate(value) if match[1] else value.items():
            check(each, match[1] or match[2], f"{where}.{key}")
    elif kind in TYPES or hasattr(models, kind):
        model: Any = getattr(models, kind, None)
        fields = TYPES.get(kind) or {model.attribute_map[key]: of for key, of in model.openapi_types.items()}
        for key, each in value.items():
            if key not in fields:
                raise Strange(400, "BadRequest", f'strict decoding error: unknown field "{where}.{key}"')
            check(each, fields[key], f"{where}.{key}")
    elif not isinstance(value, {"str": str, "int": int, "bool": bool}.get(kind, object)):
        raise Strange(400, "BadRequest", f"{where} is {value!r}, and has to be of type {kind}")


def validate(kind: str, body: dict[str, Any]) -> None:
    check(body, kind if kind in TYPES else f"V1{kind}", kind)
    name, labels = body["metadata"]["name"], body["metadata"].get("labels", {})
    bad = [value for value in labels.values() if not LABEL.fullmatch(value)]
    if bad or not SUBDOMAIN.fullmatch(name):
        raise Strange(422, "Invalid", f'{kind} "{name}" is invalid: {[name, *bad]!r}')
    for container in body["spec"]["containers"] if kind == "Pod" else []:
        if not container.get("image") or not container.get("name"):
            raise Strange(422, "Invalid", f'Pod "{name}" is invalid: spec.containers: Required value')


def selected(labels: dict[str, str], selector: str) -> bool:
    for key, equal, value, several in re.findall(r"([^,=\s]+)(?:(=)([^,]*)| in \(([^)]*)\))", selector):
        if labels.get(key) not in ([value] if equal else several.split(",")):
            return False
    return True


class KubernetesServer:
    """Its methods may be called from any thread but its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token, self.url = folder, secrets.token_hex(8), ""
        self.nodes = Nodes(folder)
        self.faults: list[Fault] = []
        self.rules: list[dict[str, Any]] | None = None
        """Of a Role: the account may do nothing else."""
        self.calls: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.strange: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> KubernetesServer:
        self._thread.start()
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        assert self.strange == []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def names(self, plural: str) -> list[str]:
        return sorted(self.nodes.of(plural))

    def kubeconfig(self) -> str:
        """The path of one."""
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        parts = {"contexts": {"context": context}, "clusters": {"cluster": {"server": self.url}}}
        parts["users"] = {"user": {"token": self.token}}
        found: dict[str, Any] = {key: [{"name": key[0], **each}] for key, each in parts.items()}
        (path := self.folder / "kubeconfig").write_text(json.dumps({**found, "current-context": "c"}))
        return str(path)

    def create(self, text: str) -> None:
        """What `kubectl create -f FILE` does."""
        for body in yaml.safe_load_all(text):
            [plural] = [key[1] for key, kind in KINDS.items() if (key[0], kind) == (body["apiVersion"], body["kind"])]
            validate(body["kind"], body)
            self.run(self.nodes.created(plural, body))

    # the wire

    async def _start(self) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._serve)
        self._runner = web.AppRunner(application, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self.nodes.stop()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        found = PATH.match(request.path)
        rest = request.path[found.end() :].strip("/").split("/") if found else []
        name, sub = [*rest, "", ""][:2]
        api = "/".join(filter(None, (found["group"], found["version"]))) if found else ""
        kind = KINDS.get((api, found["plural"])) if found else None
        verb = VERBS.get(request.method, ("", ""))[bool(name)]
        try:
            if found is None or kind is None or not verb or (sub and (sub, verb, kind) != ("log", "get", "Pod")):
                raise Strange(404, "NotFound", "the server could not find the requested resource")
            if unknown := {*request.query} - QUERIES.get(sub or verb, set()):
                raise Strange(400, "BadRequest", f"unknown query parameters: {unknown}")
            if request.headers.get("Authorization") != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            plural = found["plural"]
            self._authorize(verb, found["group"] or "", f"{plural}/{sub}" if sub else plural, found["of"])
            self.calls[f"{verb} {plural}"] += 1
            fault = next((each for each in self.faults if (each.verb, each.plural) == (verb, plural)), None)
            if fault is not None:
                fault.times -= 1
                self.faults = [each for each in self.faults if each.times]
            if fault is None or fault.carried_out:
                answer = await self._done(verb, kind, plural, name, sub, request)
            if fault is not None and not fault.code:
                assert request.transport is not None
                request.transport.abort()
            elif fault is not None:
                raise Refused(fault.code, fault.reason, "the API server is told to fail")
        except Refused as error:
            if isinstance(error, Strange):
                self.strange.append(f"{request.method} {request.path_qs}: {error.body['message']}")
            return web.json_response(error.body, status=error.code)
        return answer if fault is None else web.Response()

    def _authorize(self, verb: str, group: str, resource: str, namespace: str) -> None:
        def allows(rule: dict[str, Any]) -> bool:
            return group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]

        if namespace != NAMESPACE or (self.rules is not None and not any(allows(rule) for rule in self.rules)):
            where = f'in API group "{group}" in the namespace "{namespace}"'
            message = f'{resource} is forbidden: User "u" cannot {verb} resource "{resource}" {where}'
            raise Refused(403, "Forbidden", message)

    async def _done(
        self, verb: str, kind: str, plural: str, name: str, sub: str, request: web.Request
    ) -> web.StreamResponse:
        there = self.nodes.of(plural)
        if verb == "create":
            body = await request.json()
            validate(kind, body)
            if (name := body["metadata"]["name"]) in there:
                raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
            self.bodies.append(json.loads(json.dumps(body)))
            return web.json_response(await self.nodes.created(plural, body), status=201)
        if name and name not in there:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        if sub == "log":
            said = self.nodes.log(name)
            if said is None:
                raise Refused(400, "BadRequest", f'container "worker" in pod "{name}" is waiting to start')
            return web.Response(text="".join(said.splitlines(keepends=True)[-int(request.query["tailLines"]) :]))
        selector = request.query.get("labelSelector", "")
        found = [name] if name else [key for key, each in there.items() if selected(_labels(each), selector)]
        items = [there[each] for each in found]
        for each in found if verb.startswith("delete") else []:
            policy, grace = (
                request.query.get("propagationPolicy", "Background"),
                request.query.get("gracePeriodSeconds"),
            )
            self.nodes.remove(plural, each, float(grace or 30), background=policy == "Background")
        for item in items:
            check(item, kind if kind in TYPES else f"V1{kind}", kind)  # its own, too
        listed = {"kind": f"{kind}List", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items}
        return web.json_response(items[0] if name else listed)


def _labels(of: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = of["metadata"].get("labels", {})
    return found
