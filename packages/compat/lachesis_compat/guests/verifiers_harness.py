"""A harness of verifiers 1: its chat loop, in the process of the run instead of a process for each rollout.

It does what verifiers' `null` harness does: it offers the tools of the task's servers, runs their calls one after the
other, and ends with an answer without calls. Every completion goes through verifiers' interception, so limits, stop
conditions, hooks and the trace are verifiers' own. The messages of the model are sent back exactly as they came.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from typing import Any, Final

import aiohttp
from verifiers.v1 import harnesses
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import InterceptionError
from verifiers.v1.harness import Harness, HarnessSession
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS, bound_tool_message
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult

ID: Final = "lachesis"
"""The id of the harness in settings of verifiers."""
_ENDED: Final = ProgramResult(exit_code=0, stdout="", stderr="")


class ChatHarnessConfig(HarnessConfig):  # type: ignore[misc]
    """Settings of `ChatHarness`: those of every harness."""

    id: str = ID


class ChatHarness(Harness[ChatHarnessConfig]):  # type: ignore[misc]
    """Plays a task with the tools of its servers, and with no others."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def session(self, *args: Any, **kwargs: Any) -> ChatSession:
        """The conversation of one rollout."""
        return ChatSession(self, *args, **kwargs)

    async def launch(self, *args: Any, **kwargs: Any) -> ProgramResult:
        """The first segment of a conversation, alone."""
        session = await self.session(*args, **kwargs)
        try:
            return await session._run(None)
        finally:
            await session.close()


class ChatSession(HarnessSession):  # type: ignore[misc]
    """Its messages and its connections to the tool servers last as long as the rollout."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        system, prompt = self.harness.resolve_prompt(self.data)
        self._messages: list[Any] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            self._messages.append({"role": "user", "content": prompt})
        else:
            self._messages += map(message_to_wire, prompt or ())
        self._stack = AsyncExitStack()
        self._http: aiohttp.ClientSession | None = None
        self._tools: list[dict[str, Any]] = []
        self._places: dict[str, Any] = {}
        self._servers: dict[str, Any] = {}

    async def _run(self, messages: Any) -> ProgramResult:
        """One segment: up to an answer without calls, or a prompt that no longer fits the model."""
        if self._http is None:
            await self._connect()
        self._messages += map(message_to_wire, messages or ())
        while True:
            status, answer = await self._post(
                f"{self.endpoint}/chat/completions",
                {
                    "model": self.ctx.model,
                    "messages": self._messages,
                    **({"tools": self._tools} if self._tools else {}),
                },
            )
            if status in (400, 413) and any(each in str(answer).casefold() for each in CONTEXT_OVERFLOW_MARKERS):
                return _ENDED
            if status != 200:  # of a stopped rollout and of a failed model too: verifiers knows which it was
                raise InterceptionError(f"a request to the model was answered with {status}: {answer}")
            message = answer["choices"][0]["message"]
            self._messages.append(message)
            if not message.get("tool_calls"):
                return _ENDED
            for call in message["tool_calls"]:
                content = await self._play(call["id"], call["function"])
                said = {"role": "tool", "tool_call_id": call["id"], "content": content}
                self._messages.append(bound_tool_message(said))

    async def _connect(self) -> None:
        self._http = await self._stack.enter_async_context(
            aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self.secret}"}, timeout=aiohttp.ClientTimeout(total=None)
            )
        )
        servers = {
            name: {"url": url, "timeout": self.harness.config.tool_timeout} for name, url in self.mcp_urls.items()
        }
        self._tools, self._places, self._servers = await connect_mcp({"mcpServers": servers}, self._stack)

    async def _post(self, url: str, body: dict[str, Any]) -> tuple[int, Any]:
        """The status of the answer, and the JSON in it."""
        assert self._http is not None
        try:
            async with self._http.post(url, json=body) as response:
                return response.status, json.loads(await response.read())
        except (aiohttp.ClientError, json.JSONDecodeError) as error:
            raise InterceptionError(f"verifiers' interception at {url} did not answer: {error}") from error

    async def _play(self, call_id: str, function: dict[str, Any]) -> Any:
        """The content of a call's result. What is wrong with the call is told to the model, in `null`'s words."""
        name, text = function["name"], function.get("arguments") or "{}"
        try:
            arguments = json.loads(text)
            wrong = f"arguments must be a JSON object, got {type(arguments).__name__}; resend as an object"
        except json.JSONDecodeError as error:
            arguments, wrong = text, f"arguments: invalid JSON ({error}); resend the call with valid JSON"
        if self.tool_interception_url:
            asked = {"tool_call_id": call_id, "name": name, "arguments": arguments}
            status, decision = await self._post(self.tool_interception_url, asked)
            if status != 200 or decision["action"] == "stop":
                raise InterceptionError(f"verifiers' gate of tools ended the rollout: {decision}")
            if decision["action"] == "deny":
                return decision["message"]["content"]
        if not isinstance(arguments, dict):
            return f"error: tool {wrong}"
        if name not in self._places:
            return f"error: unknown tool {name!r}"
        return await call_mcp(self._servers, self._places, name, arguments)

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        await self._stack.aclose()


__all__ = ["ChatHarness"]

# verifiers finds a harness by its id, as a module of this package or as an installed module that is not in a package.
sys.modules.setdefault(f"{harnesses.__name__}.{ID}", sys.modules[__name__])
