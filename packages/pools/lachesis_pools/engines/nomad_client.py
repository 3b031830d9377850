"""A client of Nomad's HTTP API, as far as jobs, allocations and variables go."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import aiohttp

from backends.errors import BackendError

_PAUSES = (0.2, 1.0, 3.0)
"""Seconds before a call is made again. All calls may be repeated: each sets a state, and none counts."""
_STEPS = {
    403: "a token in NOMAD_TOKEN whose policy has submit-job, read-job, list-jobs, and variables at nomad/jobs/*",
    404: "look whether it is there; variables need Nomad 1.4 or newer",
    500: "nomad server members, or what `nomad job validate` says of a job",
}


class NomadClient:
    """Calls of one agent. Use it in one event loop, and close it.

    Args:
        address: of the agent. Default: NOMAD_ADDR, or this machine's port 4646.
        token: default: NOMAD_TOKEN.
        namespace: default: NOMAD_NAMESPACE, or that of the token.
        region: default: NOMAD_REGION, or that of the agent.
        timeout: seconds for one try of one call, not for all of them.
    """

    def __init__(
        self, address: str = "", token: str = "", *, namespace: str = "", region: str = "", timeout: float = 30.0
    ) -> None:
        self.address = (address or os.environ.get("NOMAD_ADDR") or "http://127.0.0.1:4646").rstrip("/")
        self._token, self._timeout = token or os.environ.get("NOMAD_TOKEN", ""), timeout
        places = {
            "namespace": namespace or os.environ.get("NOMAD_NAMESPACE", ""),
            "region": region or os.environ.get("NOMAD_REGION", ""),
        }
        self._places = {key: value for key, value in places.items() if value}
        self._session: aiohttp.ClientSession | None = None

    async def leader(self) -> str:
        """The address of the leader. Raises `BackendError` where there is none."""
        found = await self._call("GET", "status/leader")
        if not found:
            raise BackendError(f"Nomad at {self.address} has no leader. Next step: nomad server members")
        return str(found)

    async def register(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Make a job, or change the one that has its ID."""
        return dict(await self._call("POST", "jobs", {"Job": job}))

    async def job(self, id: str) -> dict[str, Any]:
        return dict(await self._call("GET", f"job/{quote(id, safe='')}"))

    async def jobs(self, prefix: str = "") -> list[dict[str, Any]]:
        """Those whose IDs begin with `prefix`, each with its summary."""
        return list(await self._call("GET", "jobs", prefix=prefix))

    async def deregister(self, id: str, *, purge: bool = False) -> dict[str, Any]:
        """Stop a job. The answer comes before its tasks have ended. A job that is not there is no error."""
        return dict(await self._call("DELETE", f"job/{quote(id, safe='')}", missing={}, purge=str(purge).lower()))

    async def allocations(self, job_id: str) -> list[dict[str, Any]]:
        """Of all jobs that have had this ID, also of one that was purged."""
        return list(await self._call("GET", f"job/{quote(job_id, safe='')}/allocations", all="true"))

    async def allocation(self, id: str) -> dict[str, Any]:
        return dict(await self._call("GET", f"allocation/{id}"))

    async def evaluations(self, job_id: str) -> list[dict[str, Any]]:
        return list(await self._call("GET", f"job/{quote(job_id, safe='')}/evaluations"))

    async def logs(self, allocation_id: str, task: str, *, kind: str = "stderr", last: int = 4096) -> str:
        """The end of what a task has said."""
        options = {"task": task, "type": kind, "origin": "end", "offset": str(last), "plain": "true"}
        return str(await self._call("GET", f"client/fs/logs/{allocation_id}", text=True, **options))

    async def put_variable(self, path: str, items: Mapping[str, str]) -> None:
        """Set a variable. Paths have letters, digits and `-_~/` only."""
        await self._call("PUT", f"var/{path}", {"Path": path, "Items": items})

    async def delete_variable(self, path: str) -> None:
        """One that is not there is no error."""
        await self._call("DELETE", f"var/{path}", missing={})

    async def variables(self, prefix: str) -> list[str]:
        """The paths that begin with `prefix`."""
        return [each["Path"] for each in await self._call("GET", "vars", prefix=prefix)]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _call(
        self, method: str, path: str, body: Any = None, *, missing: Any = None, text: bool = False, **options: str
    ) -> Any:
        """The answer; `missing` for what is not there, if given."""
        named = f"{method} {self.address}/v1/{path}"
        for pause in (*_PAUSES, None):
            try:
                status, said = await self._try(method, path, body, {**self._places, **options})
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                reason, step = (
                    str(error) or type(error).__name__,
                    "set NOMAD_ADDR to an agent that this machine reaches",
                )
            else:
                if status < 300:
                    return said if text else _decoded(said, named)
                if status == 404 and missing is not None:
                    return missing
                reason, step = f"{status} {said.strip()[:500]}", _STEPS.get(status, "nomad server members")
                # Nomad answers 500 to a job that it does not take, too: only an election passes.
                if status not in (429, 502, 503, 504) and "leader" not in said:
                    break
            if pause is not None:
                await asyncio.sleep(pause)
        raise BackendError(f"Nomad: {named}: {reason}. Next step: {step}")

    async def _try(self, method: str, path: str, body: Any, query: Mapping[str, str]) -> tuple[int, str]:
        if self._session is None:
            headers = {"X-Nomad-Token": self._token} if self._token else {}
            connector = aiohttp.TCPConnector(ssl=_tls())
            self._session = aiohttp.ClientSession(headers=headers, connector=connector)
        within = aiohttp.ClientTimeout(total=self._timeout)
        url = f"{self.address}/v1/{path}"
        async with self._session.request(method, url, json=body, params=query, timeout=within) as response:
            return response.status, await response.text(errors="replace")


def _decoded(said: str, named: str) -> Any:
    try:
        return json.loads(said) if said else {}
    except ValueError:
        raise BackendError(f"{named}: no answer of Nomad: {said[:300]!r}. Next step: look at NOMAD_ADDR") from None


def _tls() -> ssl.SSLContext | bool:
    """What the variables of Nomad's own command say."""
    authority, certificate = os.environ.get("NOMAD_CACERT"), os.environ.get("NOMAD_CLIENT_CERT")
    if not authority and not certificate:
        return True
    context = ssl.create_default_context(cafile=authority)
    if certificate:
        context.load_cert_chain(certificate, os.environ.get("NOMAD_CLIENT_KEY"))
    return context
