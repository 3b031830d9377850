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


class Guest:
    rewards = "sum"

    def __init__(self, target, rows=None, **settings):
        folder = SERVERS / target
        if not (folder / "app.py").exists():
            names = sorted(path.parent.name for path in SERVERS.glob("*/app.py"))
            raise ValueError("NeMo Gym has no resources server %r; there are %s" % (target, ", ".join(names)))
        rows = Path(rows).absolute() if rows else folder / "data/example.jsonl"
        self.rows = [json.loads(line) for line in rows.read_text().splitlines() if line.strip()]
        self.size = len(self.rows)
        os.chdir(folder.parents[1])  # files are named from there
        sys.path.insert(0, str(folder))
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
            server_client=ServerClient.model_construct(head_server_config=None, global_config_dict={}),
        )
        self.app = server.setup_webserver()

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
        episode = Episode(self, self.rows[item["number"]])
        await episode.post("/seed_session", self.rows[item["number"]])
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
    def __init__(self, guest, row):
        self.row = row
        self.outputs = []
        asked = row["responses_create_params"]["input"]
        self.prompt = [{"role": "user", "content": asked}] if isinstance(asked, str) else [as_message(m) for m in asked]
        transport = httpx.ASGITransport(app=guest.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=300)

    async def post(self, path, body):
        answer = await self.client.post(path, json=body)
        if answer.status_code != 200:
            raise RuntimeError("%s answered %d: %s" % (path, answer.status_code, answer.text[:500]))
        return answer

    async def act(self, text):
        return None

    async def call(self, name, arguments):
        answer = await self.client.post("/" + name, json=arguments)
        failed = {"error": "HTTP %d" % answer.status_code} if answer.status_code != 200 else {}
        return {"text": answer.text, **failed}

    async def score(self, messages):
        output = [item for message in messages[len(self.prompt) :] for item in as_items(message)]
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
        found = (await self.post("/verify", {**self.row, "response": response})).json()
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


def as_message(item):
    content = item.get("content")
    if isinstance(content, list):
        content = "\n".join(part.get("text") or "" for part in content)
    role = "system" if item.get("role") == "developer" else item.get("role", "user")
    return {"role": role, "content": content}


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
