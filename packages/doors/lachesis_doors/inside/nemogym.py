"""NeMo Gym: its resources servers, called in this process instead of over HTTP.

A target is the name of a server, such as `calendar`; its rows are those of `data/example.jsonl`, or of `rows=FILE`.
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import uuid
from pathlib import Path

import httpx
import yaml
from nemo_gym.base_resources_server import SimpleResourcesServer
from nemo_gym.server_utils import ServerClient

SERVERS = Path(importlib.util.find_spec("nemo_gym").origin).parents[1] / "resources_servers"
OF_THE_INFRASTRUCTURE = ("verifier_error", "judge_failed", "provider_", "session_", "transport_")
"""Beginnings of `failure_kind` that say nothing about the agent."""
LOWEST = -1.0
"""Rewards below stand for a failure: some servers answer -100."""


class NoServers(ServerClient):
    """There is no other server here, such as a judge's model."""

    async def request(self, server_name, *args, **kwargs):
        raise ServerMissing("it asks the server %r, which is not there" % server_name)

    get = post = request


class ServerMissing(Exception):
    lost = True


class Guest:
    rewards = "sum"

    def __init__(self, target, rows=None, **settings):
        folder = SERVERS / target
        if not (folder / "app.py").exists():
            names = sorted(path.parent.name for path in SERVERS.glob("*/app.py"))
            raise ValueError("NeMo Gym has no resources server %r; there are %s" % (target, ", ".join(names)))
        rows = Path(rows).absolute() if rows else folder / "data/example.jsonl"
        self.rows = [json.loads(line) for line in rows.read_text().split("\n") if line.strip()]
        self.size = len(self.rows)
        os.chdir(folder)  # as NeMo Gym starts it
        sys.path[:0] = [str(folder), str(SERVERS.parent)]
        spec = importlib.util.spec_from_file_location("resources_server_app", folder / "app.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        classes = [
            cls
            for _, cls in inspect.getmembers(module, inspect.isclass)
            if issubclass(cls, SimpleResourcesServer) and cls.__module__ == module.__name__
        ]
        given = {
            **configured(folder),
            "host": "127.0.0.1",
            "port": 1,
            "entrypoint": "app.py",
            "name": target,
            **settings,
        }
        given.setdefault("domain", "agent")
        server = classes[-1](
            config=classes[-1].model_fields["config"].annotation(**given),
            server_client=NoServers.model_construct(head_server_config=None, global_config_dict={}),
        )
        self.app = server.setup_webserver()
        self.stepwise = any(getattr(route, "path", "") == "/step" for route in self.app.routes)

    def item(self, number):
        asked = self.rows[number]["responses_create_params"]
        tools = [
            {
                "name": tool["name"],
                "description": tool.get("description") or "",
                "parameters": tool.get("parameters") or {"type": "object", "properties": {}},
            }
            for tool in asked.get("tools") or ()
            if tool.get("type", "function") == "function"
        ]
        return {"item": {"number": number}, "tools": tools}

    async def open(self, item):
        episode = (StepwiseEpisode if self.stepwise else Episode)(self, self.rows[item["number"]])
        await episode.begin()
        return episode


def configured(folder):
    """The settings of the server in its own files."""
    found = {}
    for path in sorted(folder.glob("configs/*.yaml")):
        for top in (yaml.safe_load(path.read_text()) or {}).values():
            if isinstance(top, dict) and isinstance(top.get("resources_servers"), dict):
                found = {**(next(iter(top["resources_servers"].values())) or {}), **found}
    return {key: value for key, value in found.items() if not (isinstance(value, str) and "${" in value)}


class Episode:
    """A server with `/seed_session`, a path for each tool, and `/verify`."""

    def __init__(self, guest, row):
        self.row = row
        asked = row["responses_create_params"]["input"]
        self.prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else as_messages(asked)
        transport = httpx.ASGITransport(app=guest.app)  # which raises what the server raises
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300)

    async def begin(self):
        await self.post("/seed_session", self.row)

    async def post(self, path, body):
        try:
            answer = await self.client.post(path, json=body)
        except Exception as error:
            cause = error
            while cause is not None and not getattr(cause, "lost", False):
                cause = cause.__cause__ or cause.__context__
            raise (cause or error) from None
        if answer.status_code != 200:
            raise RuntimeError("%s answered %d: %s" % (path, answer.status_code, answer.text[:500]))
        return answer.json()

    async def act(self, text):
        return None

    async def call(self, name, arguments):
        try:
            answer = await self.client.post("/" + name, json=arguments)
        except Exception as error:  # what the agent of a server of its own reads as status 500
            return {"text": "Internal Server Error", "error": "HTTP 500, %s" % type(error).__name__}
        failed = {"error": "HTTP %d" % answer.status_code} if answer.status_code != 200 else {}
        return {"text": answer.text, **failed}

    def with_response(self, output):
        """The row, with what the agent said."""
        response = {
            "id": "response",
            "created_at": 0,
            "model": "policy",
            "object": "response",
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": self.row["responses_create_params"].get("tools") or [],
            "output": output,
        }
        return {**self.row, "response": response}

    async def score(self, messages):
        output = [item for message in messages for item in as_items(message)]
        found = await self.post("/verify", self.with_response(output))
        kind = found.get("failure_kind") or ""
        if found.get("mask_sample") or kind.startswith(OF_THE_INFRASTRUCTURE):
            return {"invalid": found.get("failure_reason") or kind or "the server masks it"}
        reward = found.get("reward")
        if reward is None or reward < LOWEST:
            return {"invalid": "the server answers the reward %r" % (reward,)}
        parts = found.get("reward_components") or {}
        numbers = {key: value for key, value in parts.items() if isinstance(value, (int, float))}
        return {"reward": float(reward), "components": numbers}

    async def close(self):
        with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError):
            await self.client.aclose()


class StepwiseEpisode(Episode):
    """A server in the style of Gymnasium: `/reset`, then `/step` with each message. A call is a step of its own."""

    async def begin(self):
        opened = await self.post("/reset", self.row)
        self.closes = (opened.get("info") or {}).get("supports_explicit_close") is True
        if opened.get("observation"):
            self.prompt.append({"role": "user", "content": opened["observation"]})

    async def act(self, text):
        return await self.step(as_items({"role": "assistant", "content": text}))

    async def call(self, name, arguments):
        function = {"name": name, "arguments": json.dumps(arguments)}
        return await self.step(as_items({"role": "assistant", "tool_calls": [{"id": "call", "function": function}]}))

    async def step(self, output):
        body = self.with_response(output)
        body["_ng_step_request_id"] = uuid.uuid4().hex
        found = await self.post("/step", body)
        info = found.get("info") or {}
        if info.get("mask_sample"):
            self.masked = str(info.get("failure_reason") or "the server masks it")
        outputs = [str(each.get("output")) for each in info.get("tool_outputs") or ()]
        text = "\n\n".join(filter(None, [*outputs, found.get("observation")]))
        done = bool(found.get("terminated") or found.get("truncated"))
        return {"text": text or "(no observation)", "reward": float(found.get("reward") or 0.0), "done": done}

    masked = ""

    async def score(self, messages):
        return {"invalid": self.masked} if self.masked else {}  # the rewards of the steps

    async def close(self):
        with contextlib.suppress(Exception):
            if self.closes:
                await self.post("/close", {})
        await super().close()


def as_messages(items):
    """Items of OpenAI's Responses API as messages."""
    messages = []
    for item in items:
        kind, content = item.get("type", "message"), item.get("content")
        if isinstance(content, list):
            content = "\n".join(part.get("text") or "" for part in content)
        if kind == "function_call":
            if not (messages and messages[-1]["role"] == "assistant"):
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item["name"], "arguments": item["arguments"]}
            made = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(made)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": str(item["output"])})
        elif kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role", "user")
            messages.append({"role": role, "content": content or ""})
    return messages


def as_items(message):
    """A message as items of OpenAI's Responses API."""
    if message["role"] == "tool":
        return [
            {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"] or ""}
        ]
    if message["role"] != "assistant":
        return [{"type": "message", "role": message["role"], "content": message["content"] or ""}]
    items = []
    if message.get("reasoning"):
        summary = [{"type": "summary_text", "text": message["reasoning"]}]
        items.append({"type": "reasoning", "id": "reasoning", "summary": summary})
    if message.get("content"):
        text = [{"type": "output_text", "text": message["content"], "annotations": []}]
        items.append({"type": "message", "id": "message", "role": "assistant", "status": "completed", "content": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        made = {"type": "function_call", "id": call["id"], "call_id": call["id"], "status": "completed"}
        items.append({**made, "name": function["name"], "arguments": function["arguments"]})
    return items
