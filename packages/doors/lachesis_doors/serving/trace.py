"""A rollout as a trace of verifiers 0.4: a graph of messages, each with the tokens that it adds to those before it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from lachesis.loop.outcome import Outcome
from lachesis.loop.rollout import PlayedGroup, Rollout
from lachesis_doors.serving.refusals import UNTRAINABLE
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse, MessageGraph, Node, ToolResponse

_ERRORS: Final = {"infra_error": "SandboxError", "model_server": "ProviderError", "environment": "EnvError"}
"""The names of verifiers for `Rollout.unscored_kind`."""


def trace_of(group: PlayedGroup, task: Mapping[str, Any], untrainable: str = "") -> dict[str, Any]:
    """The delta that is the whole trace of a rollout which has a result. `untrainable`: why it may not be trained."""
    (rollout,) = group.rollouts
    assert rollout.result is not None
    nodes, calls, versions = nodes_of(rollout.result.history)
    name, score = uuid.uuid4().hex, None if untrainable else rollout.reward
    standing = {
        "agent": {"config": {}},
        "tools": [tool["function"] for tool in group.tools],
        "rewards": {"reward": None if score is None else {"score": score, "weight": 1.0}},
        "metrics": dict(rollout.metrics),
        "is_completed": True,
        "stop_condition": rollout.outcome.value,
        **standing_of(rollout, untrainable),
    }
    if versions:
        standing["info"] = {"policy_versions": {str(at): each for at, each in versions.items()}}
    errors = standing.pop("errors")
    opened = {"version": 1, "id": name, "verifiers": {"version": "0.4.0"}, "task": task}
    return {"trace": name, "open": opened, "nodes": nodes, "calls": calls, "errors": errors, "set": standing}


def standing_of(rollout: Rollout, untrainable: str = "") -> dict[str, Any]:
    """Whether it has a score that may be trained, and the reason where it has none."""
    kind, why = (UNTRAINABLE, untrainable) if untrainable else (rollout.unscored_kind, rollout.unscored_because)
    error = {"type": _ERRORS.get(kind, kind), "message": why, "traceback": rollout.traceback}
    scored = rollout.reward is not None and not untrainable
    return {"ok": scored, "is_timeout": rollout.outcome is Outcome.TIMEOUT, "errors": [] if scored else [error]}


def nodes_of(
    history: MessageHistory,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[int, list[tuple[str, int, int]]]]:
    """The nodes, the calls of the model, and by node the versions of the weights that sampled its tokens.

    The nodes of a path, one after the other, have exactly the ids that the model was given and sampled: a completion's
    node begins with the ids of its prompt that are new. A prompt that does not continue the ids before it begins a
    path of its own. A discarded attempt is a call without a node.
    """
    paths = _Paths()
    calls: list[dict[str, Any]] = []
    versions: dict[int, list[tuple[str, int, int]]] = {}
    completed: dict[Node, int] = {}
    attempts = {id(said) for said in history.replaced_attempts()}
    for node in completions_of(history):
        said = node.origin
        assert isinstance(said, ChatResponse)
        if id(said) in attempts:
            calls.append(_call(None, said))
            continue
        pieces = list(said.tokens.prompt.lineage()) if said.tokens is not None else []
        context: list[Node] = []
        above = node.parent
        while above is not None:
            if above in completed and (end := _end(above)) in (None, *pieces):
                pieces = pieces[: pieces.index(end)] if end is not None else pieces
                break
            context.append(above)
            above = above.parent
        parent = paths.add_context(completed[above] if above is not None else None, reversed(context))
        more: dict[str, Any] = {"sampled": True}
        if said.tokens is not None:
            new, ids = [each for piece in reversed(pieces) for each in piece.own_ids], said.tokens.ids
            more |= {"token_ids": new + ids, "mask": [False] * len(new) + [True] * len(ids)}
            more["logprobs"] = list(said.tokens.logprobs)
        completed[node] = paths.add(parent, node, **more)
        calls.append(_call(completed[node], said))
        if said.tokens is not None and said.tokens.versions:
            versions[completed[node]] = list(said.tokens.versions)
    path = history.nodes()
    last = max((at for at, node in enumerate(path) if node in completed), default=-1)
    paths.add_context(completed[path[last]] if last >= 0 else None, path[last + 1 :])
    return paths.nodes, calls, versions


class _Paths:
    """The nodes of a trace. A trainer makes a sample of every path from a root to a leaf, and trains what is sampled
    there. So where a path leaves another one after a completion, it goes on from copies of the nodes before, which are
    context."""

    def __init__(self) -> None:
        self.nodes: list[dict[str, Any]] = []
        self._known: dict[tuple[int | None, Node], int] = {}
        self._continued: set[int] = set()
        self._trained: set[int] = set()
        """Nodes on whose path something is trained."""
        self._copies: dict[int, int] = {}

    def add(self, parent: int | None, node: Node, **more: Any) -> int:
        if parent in self._continued:
            parent = self._as_context(parent)
        at = len(self.nodes)
        self.nodes.append({"parent": parent, "message": _message(node.message), **more})
        if parent is not None:
            self._continued.add(parent)
        if parent in self._trained or more.get("logprobs"):
            self._trained.add(at)
        return at

    def add_context(self, parent: int | None, context: Iterable[Node]) -> int | None:
        for node in context:
            if (parent, node) not in self._known:
                self._known[parent, node] = self.add(parent, node)
            parent = self._known[parent, node]
        return parent

    def _as_context(self, at: int) -> int:
        line: list[int] = []
        end: int | None = at
        while end in self._trained and end not in self._copies:
            line.append(end)
            end = self.nodes[end]["parent"]
        parent = self._copies.get(end, end) if end is not None else None
        for each in reversed(line):
            copy = {**self.nodes[each], "parent": parent, "sampled": False, "logprobs": []}
            parent = self._copies[each] = len(self.nodes)
            self.nodes.append({**copy, "mask": [False] * len(copy.get("token_ids", ()))})
        assert parent is not None
        return parent


def completions_of(graph: MessageGraph) -> Iterator[Node]:
    """Those of sub-agents come where their result is."""
    for node in graph.all_nodes():
        if node.sampled:
            yield node
        elif isinstance(node.origin, ToolResponse) and node.origin.chat is not None and node.source is None:
            yield from completions_of(node.origin.chat)


def _end(node: Node) -> Any:
    """The ids up to the end of a completion; None where they are not known."""
    tokens = node.origin.tokens if isinstance(node.origin, ChatResponse) else None
    return tokens.after if tokens is not None else None


def _call(node: int | None, said: ChatResponse) -> dict[str, Any]:
    used, reason = said.usage, said.finish_reason.value
    usage = None
    if used.prompt_tokens is not None and used.completion_tokens is not None:
        cached = used.cached_tokens or 0
        usage = {
            "prompt_tokens": used.prompt_tokens - cached,
            "completion_tokens": used.completion_tokens,
            "cached_input_tokens": cached,
        }
    ended = reason if reason in ("stop", "length", "tool_calls") else None
    sampling = dict(said.sampling)
    return {"node": node, "model": said.model, "sampling": sampling, "finish_reason": ended, "usage": usage}


def _message(message: Message) -> dict[str, Any]:
    plain = message.to_openai("reasoning_content")
    if message.tool_calls:
        calls = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
        plain["tool_calls"] = calls
    return plain
