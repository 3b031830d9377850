"""Rollouts of every kind for prime-rl and NeMo RL: each sampled token is trained once, or the rollout is refused.

Where verifiers is installed (`make test-guests`), its own types read the traces.
"""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_tools import BUILTIN_TOOLS, tool
from tests.doors.test_agent_serving import EnvClient, guesses
from tests.doors.test_frames import Halves
from tests.doors.test_serving import serving
from tests.support.small_envs import SortWords
from tests.support.summarising import Summarises
from tests.support.training_runs import with_tokens


@tool(toolset="look")
async def look(at: str) -> str:
    """Look at something."""
    return "There is a tide table on the wall of the harbour office. " * 3


class Always(SortWords):
    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        return 0.5


class Harbour(Always):
    """Its context is compressed, which edits the conversation."""

    name = "harbour"
    tools = BUILTIN_TOOLS.extended(look)
    toolsets = ("look",)


class Delegates(Always):
    name = "delegates"
    toolsets = ("delegation",)


def calling(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def delegating(ask: Ask) -> str:
    if "SUBTASK" in ask.prompt and "Write the words of" not in ask.prompt:
        return "I found a pear."
    return calling("delegate_task", goal="SUBTASK") if ask.turn == 0 else "Done."


def stumbling() -> Any:
    """Its first answer has a call that cannot be read, and is sampled again."""
    numbers = count()
    return lambda ask: "<tool_call>\n{oops\n</tool_call>" if next(numbers) == 0 else guesses(ask)


@dataclass
class Kind:
    """How a rollout is played, and what a trainer gets of it."""

    policy: Any
    env_cls: Any = Halves
    settings: Any = None
    discarded: int = 0
    """Completions that nobody trains."""
    reward: float | None = 0.5
    chain: bool = True
    """Whether it is one unbroken chain of tokens."""


KINDS = {
    "plain": lambda: Kind(guesses),
    "edited": lambda: Kind(
        Summarises(),
        Harbour,
        {"max_agent_turns": 12, "max_token_length": 60, "compress_context_at": 700, "enabled_toolsets": ["look"]},
        chain=False,
    ),
    "sub-agent": lambda: Kind(delegating, Delegates, {"enabled_toolsets": ["delegation"]}, chain=False),
    "discarded attempt": lambda: Kind(stumbling(), discarded=1),
    "not scored": lambda: Kind(lambda ask: calling("guess", number=6 if ask.turn == 0 else 1), reward=None),
    "infrastructure": lambda: Kind(lambda ask: calling("guess", number=6 if ask.turn == 0 else 0), reward=None),
}
Trained = Counter[tuple[tuple[int, ...], tuple[int, ...]]]
"""By the ids before a completion, and its own: how often it is trained."""


def sampled(model: FakeServer, kind: Kind) -> Trained:
    """What the server sampled, without the discarded attempts, which come first."""
    answered = [seen for seen in model.requests if seen.state == "answered"][kind.discarded :]
    return Counter((tuple(seen.call.prompts[0]), tuple(made.ids)) for seen in answered for made in seen.completions)


def versions_of(model: FakeServer) -> list[list[list[Any]]]:
    return [[list(each) for each in made.versions] for seen in model.requests for made in seen.completions]


@asynccontextmanager
async def updated(kind: Kind) -> Any:
    """A server that has new weights from its third completion on."""
    asked = count()

    class Policy:
        def reply(self, ask: Ask) -> Any:
            if next(asked) == 1:
                model.update_weights("v2", seed=2)
            return inner.reply(ask)

    async with FakeServer(kind.policy, weight_version="v1") as model:
        inner, model.policy = model.policy, Policy()
        yield model


# --- prime-rl


def branches_of(nodes: list[dict[str, Any]]) -> Iterator[list[int]]:
    """prime-rl makes a sample of each."""
    for leaf in sorted(set(range(len(nodes))) - {node["parent"] for node in nodes}):
        line, at = [], leaf
        while at is not None:
            line.insert(0, at)
            at = nodes[at]["parent"]
        yield line


def trained_by_prime(nodes: list[dict[str, Any]]) -> Trained:
    found: Trained = Counter()
    for line in branches_of(nodes):
        ids: list[int] = []
        for at in line:
            own, mask = nodes[at].get("token_ids", []), nodes[at].get("mask", [])
            assert len(own) == len(mask) and mask == sorted(mask)
            assert len(nodes[at].get("logprobs", [])) == sum(mask)
            begin = len(ids) + mask.count(False)
            ids += own
            if any(mask):
                found[tuple(ids[:begin]), tuple(ids[begin:])] += 1
    return found


async def traces_of(kind: Kind, folder: Path, model: FakeServer) -> tuple[Any, Any]:
    """The only trace, and the reply."""
    settings = {"max_infra_retries": 0, "enabled_toolsets": [], **(kind.settings or {})}
    tokenizer = with_tokens(model, folder).tokenizer_name
    async with serving("prime", kind.env_cls, folder, **settings) as service:
        client = EnvClient(service.root_url)
        try:
            more = {"headers": {"X-Team": "blue"}, "headers_from_env": {}}
            asked = {"temperature": 1.0, "logprobs": True, "cache_salt": "3", "top_k": -1, "min_p": 0.0}
            (delta,), reply = await client.run(
                1, model.base_url, sampling=asked, type="train", renderer_model_name=tokenizer, **more
            )
        finally:
            client.close()
    return delta, reply


@pytest.mark.parametrize("name", KINDS)
async def test_prime_rl_gets_every_sampled_token_once(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]()
    async with updated(kind) as model:
        delta, reply = await traces_of(kind, tmp_path, model)
        known = sampled(model, kind)
        assert {seen.headers["X-Team"] for seen in model.requests} == {"blue"}
        assert {seen.route for seen in model.requests} == {"vllm-generate"}
        calls = len(model.requests)
        versions = versions_of(model)
    nodes, told = delta["nodes"], delta["set"]
    assert reply["head"]["ok"] is (kind.reward is not None)
    assert told["rewards"]["reward"] == (None if kind.reward is None else {"score": kind.reward, "weight": 1.0})
    assert trained_by_prime(nodes) == known and max(known.values()) == 1
    assert len(delta["calls"]) == calls
    assert [call["node"] is None for call in delta["calls"]].count(True) == kind.discarded
    by_node = told["info"]["policy_versions"]
    placed = [str(call["node"]) for call in delta["calls"] if call["node"] is not None]
    assert sorted(map(str, versions[kind.discarded :])) == sorted(str(by_node[at]) for at in placed)
    assert {each[0] for spans in by_node.values() for each in spans} == ({"v1", "v2"} if calls > 2 else {"v1"})
    if importlib.util.find_spec("verifiers") is not None:
        assert_read_by_verifiers(delta)


def assert_read_by_verifiers(delta: dict[str, Any]) -> None:
    from verifiers.v1.trace import WireTrace

    nodes = delta["nodes"]
    trace = WireTrace.model_validate(
        {**delta["open"], **delta["set"], **{name: delta[name] for name in ("nodes", "calls", "errors")}}
    )
    for branch, line in zip(trace.branches, branches_of(nodes), strict=True):
        assert branch.token_ids == [token for at in line for token in nodes[at].get("token_ids", [])]
        assert branch.sampled_mask == [flag for at in line for flag in nodes[at].get("mask", [])]
        kept = [value for value, flag in zip(branch.logprobs, branch.sampled_mask, strict=True) if flag]
        assert kept == [value for at in line for value in nodes[at].get("logprobs", [])]


async def test_verifiers_own_client_gets_the_tokens_of_the_server_that_it_names(tmp_path: Path) -> None:
    pytest.importorskip("verifiers", reason="verifiers is not installed: `make test-guests` installs it")
    from verifiers.v1.configs.client import TrainClientConfig
    from verifiers.v1.serve import EnvClient as TheirClient
    from verifiers.v1.types import SamplingConfig

    kind = KINDS["edited"]()
    settings = {"max_infra_retries": 0, **kind.settings}
    async with updated(kind) as model, serving("prime", kind.env_cls, tmp_path, **settings) as service:
        client = TheirClient(service.root_url)
        config = TrainClientConfig(
            base_url=model.base_url,
            api_key_var="NO_KEY",
            headers={"X-Team": "blue"},
            renderer_model_name=with_tokens(model, tmp_path).tokenizer_name,
        )
        sampling = SamplingConfig(temperature=1.0, max_tokens=60, cache_salt="3")
        data = {"idx": 0, "prompt": None, "split": "train", "index": 0}
        (trace,) = (await client.run(config, "fake", sampling, data, lambda _: None)).traces
        await client.close()
        known = sampled(model, kind)
    assert (trace.ok, trace.reward) == (True, 0.5)
    assert trained_by_prime([node.model_dump() for node in trace.nodes]) == known
    assert len(trace.branches) > 1


# --- NeMo RL


def trained_by_nemo(found: dict[str, Any]) -> Trained:
    """The assertion of NeMo RL, which it makes of masked rollouts too, and what it trains."""
    seen: list[int] = []
    trained: Trained = Counter()
    for item in found["response"]["output"]:
        if item.get("generation_token_ids"):
            prompt, ids = item["prompt_token_ids"], item["generation_token_ids"]
            assert seen == prompt[: len(seen)], "non-contiguous messages"
            assert len(ids) == len(item["generation_log_probs"])
            trained[tuple(prompt), tuple(ids)] += 1
            seen = [*prompt, *ids]
    return trained


async def verified(kind: Kind, folder: Path, model: FakeServer, **more: Any) -> dict[str, Any]:
    settings = {"max_infra_retries": 0, "enabled_toolsets": [], **(kind.settings or {}), **more}
    config = with_tokens(model, folder).model_copy(update={"max_retries": 0})
    async with (
        serving("nemogym", kind.env_cls, folder, config, **settings) as service,
        aiohttp.ClientSession() as http,
    ):
        row = {"split": "train", "index": 1, "responses_create_params": {"input": [], "temperature": 1.0}}
        async with http.post(f"{service.root_url}/run", json=row) as response:
            assert response.status == 200
            return dict(await response.json())


@pytest.mark.parametrize("name", KINDS)
async def test_nemo_rl_gets_one_chain_or_the_reason_why_there_is_none(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]()
    async with updated(kind) as model:
        found = await verified(kind, tmp_path, model)
        known = sampled(model, kind)
        versions = versions_of(model)
    trained = trained_by_nemo(found)
    assert trained <= known
    masked = kind.reward is None or not kind.chain
    assert (found["mask_sample"], found["reward"]) == (masked, 0.0 if masked else kind.reward)
    if masked:
        assert found["failure_kind"] and found["failure_reason"]
        assert kind.reward is None or found["failure_kind"] == "lachesis:branched"
        return
    assert trained == known
    assert found["policy_versions"] == versions[kind.discarded :]


@pytest.mark.parametrize("name", ["edited", "sub-agent"])
@pytest.mark.parametrize("choice", ["last", "longest"])
async def test_one_of_several_chains_is_trained_where_this_is_chosen(tmp_path: Path, name: str, choice: str) -> None:
    kind = KINDS[name]()
    async with updated(kind) as model:
        found = await verified(kind, tmp_path, model, on_branches=choice)
        known = sampled(model, kind)
    trained = trained_by_nemo(found)
    assert (found["mask_sample"], found["reward"]) == (False, kind.reward)
    assert trained < known and trained
    tokens = sum(len(ids) for _, ids in known)
    delivered = sum(len(ids) for _, ids in trained)
    assert (delivered + found["tokens_left_out"], found["tokens_left_out"] > 0) == (tokens, True)
    final = max(known, key=lambda each: [*known].index(each))
    assert (final in trained) or choice == "longest"
