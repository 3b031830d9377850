"""An environment as an agent server of NeMo Gym: `lachesis serve ENV --as nemogym`.

The wire is that of nemo-gym 0.7.0. A row names a task; `/run` plays it with the loop of the environment and the model
server of the settings, which may be one of NeMo Gym's. What has no score has `mask_sample`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from backends.errors import LachesisError
from backends.text import counted
from lachesis.loop.rollout import PlayedGroup
from lachesis_doors.serving.host import NoPlace, NoSuchTask, ServingHost
from lachesis_doors.serving.policies import TOKEN_FIELDS, RequestPolicy
from lachesis_doors.serving.task_routes import body_of, refused
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import FinishReason, Message
from lachesis_messages.responses import ChatResponse, Node
from lachesis_tokens.endpoint.responses import answer
from lachesis_tokens.wire.service import WebService, json_response

_FAILURES: Final = {
    "environment": "agent_run_error",
    "infra_error": "provider_unavailable",
    "model_server": "transport_unreachable",
    "timeout": "agent_timeout",
}
"""NeMo Gym's `failure_kind` for `Rollout.unscored_kind`."""


class NeMoGymService(WebService):
    title = "the NeMo Gym agent server"
    plays = True

    def __init__(self, host: ServingHost, address: str, port: int) -> None:
        super().__init__(address, port)
        self._host = host

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/run", self._run)
        yield web.post("/aggregate_metrics", self._metrics)

    async def start(self) -> None:
        self._server = await self._host.policies.get(self._host.env.server_configs, keeps_tokens=True)
        await super().start()

    def rows(self) -> Iterable[dict[str, Any]]:
        """The tasks, as a data set of NeMo Gym."""
        for task, messages in self._host.tasks():
            yield {
                "responses_create_params": {"input": [_item(message) for message in messages]},
                "agent_ref": {"type": "responses_api_agents", "name": self._host.name},
                **task,
            }

    async def _run(self, request: web.Request) -> web.Response:
        body = await body_of(request)
        asked, split, index = body.get("responses_create_params"), body.get("split"), body.get("index")
        if not isinstance(asked, dict) or not isinstance(split, str) or type(index) is not int:
            raise refused(422, "a row has responses_create_params, split and index; --rows FILE writes such rows")
        sampling = {
            "temperature": asked.get("temperature"),
            "top_p": asked.get("top_p"),
            "max_tokens": asked.get("max_output_tokens"),
        }
        try:
            group = await self._host.play(split, index, RequestPolicy(self._server, sampling))
        except NoSuchTask as error:
            raise refused(422, str(error)) from error
        except NoPlace as error:
            raise refused(503, str(error)) from error
        except LachesisError as error:  # a setting, which no other row changes
            raise refused(500, str(error)) from error
        return json_response({**body, **verified(asked, group)})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Of the rows that have a score."""
        rows = (await body_of(request)).get("verify_responses") or ()
        scores = [row["reward"] for row in rows if not row.get("mask_sample")]
        found = {"masked": len(rows) - len(scores), **({"mean/reward": statistics.fmean(scores)} if scores else {})}
        return json_response({"group_level_metrics": [], "agent_metrics": found, "key_metrics": found})


def verified(asked: Mapping[str, Any], group: PlayedGroup) -> dict[str, Any]:
    """NeMo Gym's `BaseVerifyResponse`: the conversation, and its score."""
    (rollout,) = group.rollouts
    history = rollout.result.history if rollout.result is not None else MessageHistory()
    nodes, said = history.nodes(), history.ended_on()
    begins = next((at for at, node in enumerate(nodes) if isinstance(node.origin, ChatResponse)), len(nodes))
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in group.tools]
    params = {**asked, "input": [_item(node.item) for node in nodes[:begins]], "tools": tools}
    response = answer(params, said[-1] if said else ChatResponse(Message("assistant"), FinishReason.STOP))
    written = [item for node in nodes[begins:] for item in _items(node)]
    # An agent that gave up has said something that is no part of the conversation.
    shown = {id(node.origin) for node in nodes}
    response["output"] = written + [item for each in said if id(each) not in shown for item in _completion(each)]
    kind, why = rollout.unscored_kind, rollout.unscored_because
    if rollout.reward is not None:
        kind, why = "branched", _broken_chain(said, len(history.completions()))
    found: dict[str, Any] = {
        "responses_create_params": params,
        "response": response,
        "reward": rollout.reward,
        "mask_sample": False,
        "reward_components": dict(rollout.metrics),
    }
    if rollout.reward is None or why:
        about = {"failure_kind": _FAILURES.get(kind, f"lachesis:{kind}"), "failure_reason": why}
        found |= {"reward": 0.0, "mask_sample": True, **about}
    return found


def _completion(said: ChatResponse) -> list[dict[str, Any]]:
    """The last item of a completion has its tokens, where they are known."""
    items: list[dict[str, Any]] = answer({}, said)["output"]
    items[-1] |= _tokens(said)
    return items


def _items(node: Node) -> list[dict[str, Any]]:
    """What a message is in a Responses object."""
    if isinstance(node.origin, ChatResponse):
        return _completion(node.origin)
    if node.message.role == "tool":
        return [{"type": "function_call_output", "call_id": node.message.tool_call_id, "output": _content(node.item)}]
    return [_item(node.item)]


def _item(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "message", "role": message["role"], "content": _content(message)}


def _content(message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return [
        {"type": "input_text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"}
        for part in content
    ]


def _tokens(said: ChatResponse) -> dict[str, Any]:
    if said.tokens is not None:
        return dict(zip(TOKEN_FIELDS, (said.tokens.prompt.ids, said.tokens.ids, [*said.tokens.logprobs]), strict=True))
    return {name: list(said.message.extra[name]) for name in TOKEN_FIELDS if name in said.message.extra}


def _broken_chain(said: Sequence[ChatResponse], completions: int) -> str:
    """Why the rollout is not one chain of tokens, which is all that NeMo Gym's trainer takes; empty if it is."""
    if others := completions - len(said):
        return f"{counted(others, 'completion')} of the rollout left the conversation, and NeMo Gym takes one chain"
    seen: list[int] = []
    for number, each in enumerate(said):
        if found := _tokens(each):
            prompt, ids, _ = found.values()
            if prompt[: len(seen)] != seen:
                return f"the prompt of completion {number} does not continue the tokens before it"
            seen = [*prompt, *ids]
    return ""
