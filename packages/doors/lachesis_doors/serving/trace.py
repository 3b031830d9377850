"""A rollout as a trace of verifiers 0.4: a graph of messages, each with the tokens that it adds to those before it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, MessageGraph, Node, ToolResponse

_ERRORS: Final = {"infra_error": "SandboxError", "model_server": "ProviderError", "environment": "EnvError"}
"""The names of verifiers for `Rollout.unscored_kind`."""
_MADE_BY: Final = {"version": "0.4.0"}
_REASONS: Final = ("stop", "length", "tool_calls")


class Trace:
    """What was sent of a rollout, and what is new: the client puts the parts together.

    The nodes of a path, one after the other, have exactly the ids that the model was given and sampled: a completion's
    node begins with the ids of its prompt that are new. A prompt that does not continue the ids before it begins a
    path of its own.
    """

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.id = uuid.uuid4().hex
        self.nodes = self.calls = 0
        self._task = task
        self._opened = False
        self._completions: dict[Node, int] = {}
        self._context: dict[tuple[int | None, Node], int] = {}
        self._new: dict[str, list[dict[str, Any]]] = {"nodes": [], "calls": []}

    def delta(self, graph: MessageGraph) -> dict[str, Any] | None:
        """The completions since the last one, with the messages before them; None if there is nothing new."""
        for node in _sampled(graph.all_nodes()):
            if node not in self._completions:
                self._complete(node)
        return self._taken() if self._new["nodes"] else None

    def is_of(self, rollout: Rollout) -> bool:
        """Whether all that was sent is part of this rollout."""
        graph = rollout.result.history if rollout.result is not None else MessageHistory()
        return self._completions.keys() <= set(_sampled(graph.all_nodes()))

    def end(self, group: PlayedGroup) -> dict[str, Any]:
        """The rest of a rollout, which has a result, and how it ended."""
        (rollout,) = group.rollouts
        assert rollout.result is not None
        graph = rollout.result.history
        before = self.delta(graph) or {}
        path = graph.nodes()
        last = max((at for at, node in enumerate(path) if node in self._completions), default=-1)
        parent = self._completions[path[last]] if last >= 0 else None
        for node in path[last + 1 :]:
            parent = self._add_context(parent, node)
        rest = self._taken()
        found = {name: [*before.get(name, ()), *rest.get(name, ())] for name in ("nodes", "calls")}
        tools = [tool["function"] for tool in group.tools]
        said = {"agent": {"config": {}}, "tools": tools, **_standing(rollout)}
        return {**rest, **before, **found, "errors": errors_of(rollout), "set": said}

    def _taken(self) -> dict[str, Any]:
        found: dict[str, Any] = {"trace": self.id, **self._new}
        self._new = {"nodes": [], "calls": []}
        if not self._opened:
            self._opened = True
            found["open"] = {"version": 1, "id": self.id, "verifiers": _MADE_BY, "task": task_of(self._task)}
        return found

    def _complete(self, node: Node) -> None:
        said = node.origin
        assert isinstance(said, ChatResponse)
        tokens, context, before = said.tokens, [], 0
        known = set(tokens.prompt.lineage()) if tokens is not None else set()
        above = node.parent
        while above is not None:
            earlier = above.origin if above in self._completions else None
            if isinstance(earlier, ChatResponse):
                if tokens is None or earlier.tokens is None:
                    break
                if earlier.tokens.after in known:
                    before = earlier.tokens.after.length
                    break
            context.append(above)
            above = above.parent
        parent = self._completions[above] if above is not None else None
        for each in reversed(context):
            parent = self._add_context(parent, each)
        more: dict[str, Any] = {"sampled": True}
        if tokens is not None:
            fresh, ids = tokens.prompt.ids[before:], tokens.ids
            more["token_ids"] = fresh + ids
            more["mask"] = [False] * len(fresh) + [True] * len(ids)
            more["logprobs"] = list(tokens.logprobs)
        self._completions[node] = self._add(parent, node, **more)
        used, reason = said.usage, said.finish_reason.value
        usage = None
        if used.prompt_tokens is not None and used.completion_tokens is not None:
            cached = used.cached_tokens or 0
            usage = {"prompt_tokens": used.prompt_tokens - cached, "completion_tokens": used.completion_tokens}
            usage["cached_input_tokens"] = cached
        self._new["calls"].append(
            {
                "node": self._completions[node],
                "model": said.model,
                "sampling": dict(said.sampling),
                "finish_reason": reason if reason in _REASONS else None,
                "usage": usage,
            }
        )
        self.calls += 1

    def _add_context(self, parent: int | None, node: Node) -> int:
        if (parent, node) not in self._context:
            self._context[parent, node] = self._add(parent, node)
        return self._context[parent, node]

    def _add(self, parent: int | None, node: Node, **more: Any) -> int:
        self._new["nodes"].append(
            {"parent": parent, "message": _message(node.message), "timestamp": time.time(), **more}
        )
        self.nodes += 1
        return self.nodes - 1


def task_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """verifiers' `TraceTask`."""
    return {"type": "LachesisTask", "data": dict(data)}


def _standing(rollout: Rollout) -> dict[str, Any]:
    score = rollout.reward
    return {
        "rewards": {"reward": None if score is None else {"score": score, "weight": 1.0}},
        "metrics": dict(rollout.metrics),
        "is_completed": True,
        "ok": score is not None,
        "stop_condition": rollout.outcome.value,
        "is_timeout": rollout.outcome is Outcome.TIMEOUT,
    }


def errors_of(rollout: Rollout) -> list[dict[str, Any]]:
    """Why it has no score."""
    if rollout.reward is not None:
        return []
    kind = rollout.unscored_kind
    return [{"type": _ERRORS.get(kind, kind), "message": rollout.unscored_because, "traceback": rollout.traceback}]


def _sampled(nodes: Iterable[Node]) -> Iterator[Node]:
    """The completions, those of sub-agents included."""
    for node in nodes:
        if node.sampled:
            yield node
        elif isinstance(node.origin, ToolResponse) and node.origin.chat is not None and not node.source:
            yield from _sampled(node.origin.chat.all_nodes())


def _message(message: Message) -> dict[str, Any]:
    plain = message.to_openai("reasoning_content")
    for name in message.extra:
        plain.pop(name, None)
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "name": call.name, "arguments": call.arguments}
            for call in message.tool_calls
        ]
    return plain
