"""An environment as an agent server of NeMo Gym: `lachesis serve ENV --as nemogym`.

The wire is that of nemo-gym 0.7.0. A row names a task; `/run` runs it with the loop of the environment and the model
server of the settings, which may be one of NeMo Gym's. What has no score has `mask_sample`.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from aiohttp import web

from backends.errors import LachesisError, SettingsError
from backends.text import counted
from lachesis.loop.rollout import PlayedGroup
from lachesis_client.model_server import tracks_tokens
from lachesis_doors.door_env import first_answer
from lachesis_doors.serving.host import NoPlace, NoSuchTask, OnBranches, ServingHost
from lachesis_doors.serving.policies import RequestPolicy
from lachesis_doors.serving.refusals import TOKEN_FIELDS, UNTRAINABLE, problem_of_settings
from lachesis_doors.serving.task_routes import body_of, refused
from lachesis_doors.serving.trace import completions_of
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

_WRITTEN: Final = (
    "response",
    "reward",
    "mask_sample",
    "reward_components",
    "tokens_left_out",
    "policy_versions",
    "failure_kind",
    "failure_reason",
)
"""What `verified` may say of a rollout. A row may be the answer to an earlier attempt, which had its own."""


class NeMoGymService(WebService):
    title = "the NeMo Gym agent server"
    plays = True
    takes_one_chain = True

    def __init__(self, host: ServingHost, address: str, port: int) -> None:
        super().__init__(address, port)
        self._host = host

    def routes(self) -> Iterable[web.RouteDef]:
        yield web.post("/run", self._run)
        yield web.post("/aggregate_metrics", self._metrics)

    async def start(self) -> None:
        self._server = await self._host.policies.get(self._host.env.server_configs, keeps_tokens=True)
        tokens, of_rows = tracks_tokens(self._server), ("top_p",)  # what rows will name is not known yet
        if tokens and (problem := problem_of_settings(self._server, self._host.env.config, of_rows)):
            raise SettingsError(f"--as nemogym: {problem}")
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
            group, untrainable = await self._host.play(split, index, RequestPolicy(self._server, sampling))
        except NoSuchTask as error:
            raise refused(422, str(error)) from error
        except NoPlace as error:
            raise refused(503, str(error)) from error
        except LachesisError as error:  # a setting, which no other row changes
            raise refused(500, str(error)) from error
        row = {name: value for name, value in body.items() if name not in _WRITTEN}
        return json_response({**row, **verified(asked, group, self._host.on_branches, untrainable)})

    async def _metrics(self, request: web.Request) -> web.Response:
        """Of the rows that have a score."""
        rows = (await body_of(request)).get("verify_responses") or []
        if not isinstance(rows, list) or not all(map(_is_answer, rows)):
            raise refused(422, "verify_responses are answers of /run: each has a reward, which is a number")
        scored = [row for row in rows if not row.get("mask_sample")]
        found: dict[str, float] = {"masked": len(rows) - len(scored)}
        if left_out := sum(row.get("tokens_left_out") or 0 for row in scored):
            found["tokens_left_out"] = left_out
        if scored:
            found["mean/reward"] = statistics.fmean(row["reward"] for row in scored)
        return json_response({"group_level_metrics": [], "agent_metrics": found, "key_metrics": found})


def _is_answer(row: Any) -> bool:
    if not isinstance(row, dict):
        return False
    numbers = [row.get("tokens_left_out") or 0, *([] if row.get("mask_sample") else [row.get("reward")])]
    return all(type(each) in (int, float) for each in numbers)


def verified(
    asked: Mapping[str, Any], group: PlayedGroup, on_branches: OnBranches = "error", untrainable: str = ""
) -> dict[str, Any]:
    """NeMo Gym's `BaseVerifyResponse`: the conversation, and its score. `untrainable`: why it may not be trained.

    Its trainer asserts that every prompt with tokens begins with all tokens before it, whether the rollout is masked or
    not. So only the completions of one such chain have their tokens.
    """
    (rollout,) = group.rollouts
    history = rollout.result.history if rollout.result is not None else MessageHistory()
    nodes: Sequence[Node] = history.nodes()
    said = history.ended_on()
    chains = chains_of(history)
    chain = chains[-1] if chains else []
    kind, why = rollout.unscored_kind, rollout.unscored_because
    left_out = 0
    if rollout.reward is not None:
        kind, why = "branched", _broken_chain(history)
        if why and chain and on_branches != "error":
            why = ""
            chain = max(reversed(chains), key=_sampled) if on_branches == "longest" else chain
            end = next(node for node in completions_of(history) if node.origin is chain[-1])
            nodes, said = _path_to(end), chain
        left_out = _sampled(history.completions()) - _sampled(chain)
    if untrainable:
        kind, why = UNTRAINABLE, untrainable
    begins = first_answer(nodes)
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in group.tools]
    params = {**asked, "input": [_item(node.item) for node in nodes[:begins]], "tools": tools}
    response = answer(params, said[-1] if said else ChatResponse(Message("assistant"), FinishReason.STOP))
    shown = {id(node.origin) for node in nodes}
    # An agent that gave up has said something that is no part of the conversation.
    after = [each for each in said if id(each) not in shown]
    members = {id(each) for each in chain}
    written = [item for node in nodes[begins:] for item in _items(node, members)]
    response["output"] = written + [item for each in after for item in _completion(each, members)]
    found: dict[str, Any] = {
        "responses_create_params": params,
        "response": response,
        "reward": rollout.reward,
        "mask_sample": False,
        "reward_components": dict(rollout.metrics),
    }
    if left_out:
        found["tokens_left_out"] = left_out
    versions = [each.tokens.versions for each in chain if each.tokens is not None]
    if any(versions):
        found["policy_versions"] = versions  # empty where they are not known
    if rollout.reward is None or why:
        about = {"failure_kind": _FAILURES.get(kind, f"lachesis:{kind}"), "failure_reason": why}
        found |= {"reward": 0.0, "mask_sample": True, **about}
    return found


def chains_of(history: MessageHistory) -> list[list[ChatResponse]]:
    """The completions with tokens, without discarded attempts, as chains: a prompt begins with all tokens before it.

    A chain leads to each completion that none continues. The last one leads to that on which the conversation ended.
    """
    said = [(each, found) for each in _kept(history) if (found := _tokens(each))]
    ends = [[*found[TOKEN_FIELDS[0]], *found[TOKEN_FIELDS[1]]] for _, found in said]
    above = {id(node.origin): {id(each.origin) for each in _path_to(node)} for node in completions_of(history)}
    before: dict[int, int] = {}
    for at, (each, found) in enumerate(said):
        prompt, ancestors = found[TOKEN_FIELDS[0]], above[id(each)]
        # Another completion may have the same tokens. It is no part of this conversation.
        longest_first = sorted(
            (way for way in range(at) if id(said[way][0]) in ancestors), key=lambda way: (-len(ends[way]), -way)
        )
        if (way := next((way for way in longest_first if _begins_with(prompt, ends[way])), None)) is not None:
            before[at] = way
    leads_to = [at for at in range(len(said)) if at not in before.values()]
    final = {id(each) for each in history.ended_on()}
    if last := [at for at, (each, _) in enumerate(said) if id(each) in final][-1:]:
        leads_to = [*(at for at in leads_to if at != last[0]), *last]
    chains = []
    for end in leads_to:
        line = [end]
        while line[-1] in before:
            line.append(before[line[-1]])
        chains.append([said[at][0] for at in reversed(line)])
    return chains


def _begins_with(ids: Sequence[int], start: Sequence[int]) -> bool:
    size = len(start)
    return size <= len(ids) and ids[size - 1] == start[-1] and ids[:size] == start


def _kept(history: MessageHistory) -> list[ChatResponse]:
    """All completions but the discarded attempts, which nobody trains."""
    attempts = {id(each) for each in history.replaced_attempts()}
    return [each for each in history.completions() if id(each) not in attempts]


def _sampled(said: Iterable[ChatResponse]) -> int:
    return sum(len(found[TOKEN_FIELDS[1]]) for each in said if (found := _tokens(each)))


def _path_to(node: Node | None) -> Sequence[Node]:
    path: list[Node] = []
    while node is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _completion(said: ChatResponse, members: Collection[int]) -> list[dict[str, Any]]:
    """The last item of a completion of the chain has its tokens, where they are known."""
    items: list[dict[str, Any]] = answer({}, said)["output"]
    if id(said) in members:
        items[-1] |= _tokens(said)
    return items


def _items(node: Node, members: Collection[int]) -> list[dict[str, Any]]:
    """What a message is in a Responses object."""
    if isinstance(node.origin, ChatResponse):
        return _completion(node.origin, members)
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


def _broken_chain(history: MessageHistory) -> str:
    """Why the rollout is not one chain of tokens, which is all that NeMo Gym's trainer takes; empty if it is."""
    said = history.ended_on()
    if others := len(_kept(history)) - len(said):
        return (
            f"{counted(others, 'completion')} of the rollout left the conversation, and NeMo Gym takes one chain; "
            "--on-branches last or longest takes one of them"
        )
    seen: list[int] = []
    for number, each in enumerate(said):
        if found := _tokens(each):
            prompt, ids, _ = found.values()
            if prompt[: len(seen)] != seen:
                return (
                    f"the prompt of completion {number} does not continue the tokens before it; --on-branches last or "
                    "longest takes one chain"
                )
            seen = [*prompt, *ids]
    return ""
