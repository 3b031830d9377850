"""Rollouts that our loop plays for NeMo Gym and prime-rl: their tokens, and what has no score."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgpack
import pytest
import zmq
import zmq.asyncio

from lachesis.settings.server_settings import ServerConfig
from lachesis_testing.fake_server import Ask, FakeServer
from tests.doors.test_frames import Halves, halving
from tests.doors.test_serving import serving
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.training_runs import with_tokens


def config(server: Any) -> ServerConfig:
    return ServerConfig(base_url=server.base_url, model_name="scripted", max_retries=0)


def guesses(ask: Ask) -> str:
    """A model with tokens that guesses 6, 5 and 7."""
    guess = json.dumps({"name": "guess", "arguments": {"number": (6, 5, 7)[ask.turn]}})
    return f"<tool_call>\n{guess}\n</tool_call>"


def no_tokens(request: dict[str, Any]) -> Any:
    return {key: value for key, value in halving(request).items() if key in ("content", "tool_calls")}


# --- NeMo Gym


@asynccontextmanager
async def gym(folder: Path, model: ServerConfig, env_cls: Any = Halves, **more: Any) -> AsyncIterator[Any]:
    """Asks for the rollout of an index."""
    async with (
        serving("nemogym", env_cls, folder, model, enabled_toolsets=[], **more) as service,
        aiohttp.ClientSession() as http,
    ):

        async def run(index: Any, **params: Any) -> tuple[int, Any]:
            row = {"split": "train", "index": index, "responses_create_params": {"input": [], **params}, "own": 1}
            async with http.post(f"{service.root_url}/run", json=row) as response:
                return response.status, await response.json()

        yield run


def tokens_of(found: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    items = [item for item in found["response"]["output"] if "prompt_token_ids" in item]
    assert all(len(item["generation_token_ids"]) == len(item["generation_log_probs"]) for item in items)
    return [(item["prompt_token_ids"], item["generation_token_ids"]) for item in items]


async def test_a_chat_server_of_nemo_gym_gets_its_tokens_back(tmp_path: Path) -> None:
    async with ScriptedServer(halving) as model, gym(tmp_path, config(model)) as run:
        status, found = await run(1, temperature=0.25, top_p=0.5, max_output_tokens=99)
        assert (status, found["reward"], found["mask_sample"], found["own"]) == (200, 0.5, False, 1)
        assert tokens_of(found) == [(list(range(10 + 5 * n)), [10 + 5 * n, 11 + 5 * n]) for n in range(3)]
        said = model.requests[-1]
        assert (said["temperature"], said["top_p"], said["max_tokens"]) == (0.25, 0.5, 99)
        told = [message for message in said["messages"] if message["role"] == "assistant"]
        assert [message["generation_token_ids"] for message in told] == [[10, 11], [15, 16]]
        (keys,) = {tuple(sorted(message)) for message in said["messages"] if message["role"] == "tool"}
        assert keys == ("content", "role", "tool_call_id")  # it refuses others


async def test_reasoning_goes_back_to_nemo_gym_as_it_was_written(tmp_path: Path) -> None:
    def thinks(request: dict[str, Any]) -> Any:
        answer = halving(request)
        (called,) = answer.pop("tool_calls")
        named = {"name": "guess", "arguments": json.loads(called["function"]["arguments"])}
        return {**answer, "content": f"<think>Half.</think>\n<tool_call>\n{json.dumps(named)}\n</tool_call>"}

    async with ScriptedServer(thinks) as model, gym(tmp_path, config(model)) as run:
        assert (await run(0))[1]["reward"] == 0.75
        (told,) = [message for message in model.requests[-1]["messages"] if message["role"] == "assistant"]
        assert told["content"].startswith("<think>Half.</think>")
        assert "reasoning_content" not in told


async def test_a_server_with_tokens_gives_exactly_those_that_it_sampled(tmp_path: Path) -> None:
    async with FakeServer(guesses) as model, gym(tmp_path, with_tokens(model, tmp_path)) as run:
        _, found = await run(1)
        assert (found["reward"], found["mask_sample"]) == (0.5, False)
        sampled = [(list(seen.call.prompts[0]), list(seen.completions[0].ids)) for seen in model.requests]
        assert len(sampled) == 3
        assert tokens_of(found) == sampled


async def test_a_rollout_of_several_chains_is_no_sample(tmp_path: Path) -> None:
    def rewritten(request: dict[str, Any]) -> Any:
        said = halving(request)
        return {**said, "prompt_token_ids": [1, *said["prompt_token_ids"]]} if len(request["messages"]) > 2 else said

    async with ScriptedServer(rewritten) as model, gym(tmp_path, config(model)) as run:
        _, found = await run(0)
        assert (found["mask_sample"], found["failure_kind"], found["reward"]) == (True, "lachesis:branched", 0.0)
        assert "completion 1 does not continue" in found["failure_reason"]
    numbers = count()

    def empty_at_first(request: dict[str, Any]) -> Any:
        return say("") if next(numbers) == 0 else no_tokens(request)

    async with ScriptedServer(empty_at_first) as model, gym(tmp_path, config(model)) as run:
        _, found = await run(0)
        assert (found["mask_sample"], found["reward"]) == (False, 0.75)  # nobody trains the attempt


async def test_a_model_that_gives_up_is_scored_with_what_it_said_last(tmp_path: Path) -> None:
    def empty(request: dict[str, Any]) -> Any:
        said = halving(request)
        return {**said, "content": "", "tool_calls": None} if len(request["messages"]) > 2 else said

    async with ScriptedServer(empty) as model, gym(tmp_path, config(model), max_resamples=0) as run:
        _, found = await run(0)
        assert (found["reward"], found["mask_sample"]) == (-0.25, False)
        assert [ids for _, ids in tokens_of(found)] == [[10, 11], [15, 16]]


@pytest.mark.parametrize(
    ("answer", "kind", "why"),
    [
        (500, "transport_unreachable", "unavailable"),
        (call(("guess", {"number": 0})), "provider_unavailable", "the simulator's machine is gone"),
        (call(("guess", {"number": 1})), "agent_run_error", "the simulator fell over"),
    ],
)
async def test_what_breaks_is_masked_with_its_reason(tmp_path: Path, answer: Any, kind: str, why: str) -> None:
    async with ScriptedServer([answer]) as model, gym(tmp_path, config(model)) as run:
        status, found = await run(0)
        assert (status, found["mask_sample"], found["reward"], found["failure_kind"]) == (200, True, 0.0, kind)
        assert why in found["failure_reason"]
    assert Halves.open_sessions == 0


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"generation_log_probs": [0.0]}, "2 token ids, but 1 logprobs"),
        ({"generation_log_probs": [-0.1, float("nan")]}, "logprob of sampled token 1 is nan"),
        ({"generation_log_probs": [-0.1, 5.0]}, "logprob of sampled token 1 is 5.0"),
        ({"generation_log_probs": None}, "no token ids or no logprobs"),
        ({"generation_token_ids": [10, True]}, "True is not a token id"),
        ({"generation_token_ids": [10, -1]}, "-1 is not a token id"),
        ({"prompt_token_ids": "12"}, "no prompt_token_ids"),
        ({"prompt_token_ids": []}, "no prompt_token_ids"),
        ({"prompt_token_ids": [1, "2"]}, "'2' is not a token id"),
    ],
)
async def test_tokens_that_cannot_be_are_a_failure_of_the_model_server(
    tmp_path: Path, wrong: dict[str, Any], why: str
) -> None:
    server = ScriptedServer(lambda request: {**halving(request), **wrong})
    async with server as model, gym(tmp_path, config(model), max_infra_retries=0) as run:
        _, found = await run(0)
    assert (found["mask_sample"], found["reward"]) == (True, 0.0) and found["failure_kind"].startswith("transport")
    assert why in found["failure_reason"] and tokens_of(found) == []


async def test_an_answer_says_nothing_of_an_earlier_attempt_of_its_row(tmp_path: Path) -> None:
    earlier = {"failure_kind": "provider_unavailable", "failure_reason": "gone", "mask_sample": True, "reward": 0.0}
    earlier |= {"tokens_left_out": 500, "policy_versions": [[7, 0, 1]], "reward_components": {"old": 1.0}}
    async with (
        ScriptedServer(halving) as model,
        serving("nemogym", Halves, tmp_path, config(model), enabled_toolsets=[]) as service,
        aiohttp.ClientSession() as http,
    ):
        row = {"split": "train", "index": 1, "responses_create_params": {"input": []}, "own": 1, **earlier}
        async with http.post(f"{service.root_url}/run", json=row) as response:
            found = await response.json()
        assert (found["own"], found["reward"], found["mask_sample"]) == (1, 0.5, False)
        assert "old" not in found["reward_components"]
        assert not found.keys() & {"failure_kind", "failure_reason", "tokens_left_out", "policy_versions"}
        for rows in ([{}], [{"reward": "1"}], [{"reward": 1.0, "tokens_left_out": "5"}], [1], {"reward": 1.0}):
            async with http.post(f"{service.root_url}/aggregate_metrics", json={"verify_responses": rows}) as response:
                assert response.status == 422, rows
        both = [found, {"mask_sample": True}]
        async with http.post(f"{service.root_url}/aggregate_metrics", json={"verify_responses": both}) as response:
            assert (await response.json())["agent_metrics"] == {"masked": 1, "mean/reward": 0.5}


async def test_a_row_without_a_task_and_a_wrong_setting_are_refused(tmp_path: Path) -> None:
    async with ScriptedServer([401]) as model, gym(tmp_path, config(model)) as run:
        assert (await run(9))[0] == (await run("one"))[0] == 422
        status, said = await run(0)
        assert status == 500 and "api_key" in said["detail"]


# --- prime-rl


class EnvClient:
    """The frames of verifiers' client."""

    def __init__(self, url: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(url)
        self._numbers = count()

    async def send(self, method: str, **body: Any) -> str:
        number = f"r{next(self._numbers)}"
        await self._socket.send_multipart([number.encode(), method.encode(), msgpack.packb(body)])
        return number

    async def answer(self) -> tuple[list[Any], Any]:
        """The deltas, and the reply."""
        deltas = []
        while True:
            _, kind, body = await asyncio.wait_for(self._socket.recv_multipart(), 60)
            if kind == b"reply":
                return deltas, msgpack.unpackb(body)
            deltas.append(msgpack.unpackb(body))

    async def run(self, index: int, url: str, **client: Any) -> tuple[list[Any], Any]:
        await self.ask(index, url, **client)
        return await self.answer()

    async def ask(self, index: int, url: str, *, sampling: Any = None, **client: Any) -> str:
        about = {"type": "eval", "base_url": url, "api_key_var": "K", "headers": {}, "headers_from_env": {}, **client}
        data = {"split": "train", "index": index}
        sampling = sampling or {"temperature": 1.0}
        return await self.send("run", task_data=data, client=about, model="fake", sampling=sampling)

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def prime(folder: Path, **more: Any) -> AsyncIterator[EnvClient]:
    async with serving("prime", Halves, folder, enabled_toolsets=[], **more) as service:
        client = EnvClient(service.root_url)
        try:
            yield client
        finally:
            client.close()


async def test_the_nodes_of_a_path_are_the_tokens_that_the_server_saw_and_sampled(tmp_path: Path) -> None:
    async with FakeServer(guesses) as model, prime(tmp_path) as client:
        tokenizer = with_tokens(model, tmp_path).tokenizer_name
        deltas, reply = await client.run(1, model.base_url, type="train", renderer_model_name=tokenizer)
        assert reply["success"] and reply["head"]["ok"], reply
        (delta,) = deltas
        nodes = delta["nodes"]
        assert reply["traces"] == [{"id": delta["trace"], "nodes": 7, "calls": 3}]
        assert [seen.route for seen in model.requests] == ["vllm-generate"] * 3
        seen: list[int] = []
        turns = iter(model.requests)
        for node in nodes:
            seen += node.get("token_ids", [])
            if node.get("sampled"):
                turn = next(turns)
                ids = list(turn.completions[0].ids)
                assert seen == [*turn.call.prompts[0], *ids]
                assert node["mask"].count(True) == len(node["logprobs"]) == len(ids)
        assert [node["parent"] for node in nodes] == [None, *range(6)]
        assert delta["set"]["rewards"] == {"reward": {"score": 0.5, "weight": 1.0}}


@pytest.mark.parametrize(("number", "kind"), [(0, "SandboxError"), (1, "EnvError")])
async def test_an_episode_without_a_score_has_an_error(tmp_path: Path, number: int, kind: str) -> None:
    async with ScriptedServer([call(("guess", {"number": number}))]) as model, prime(tmp_path) as client:
        deltas, reply = await client.run(0, model.base_url)
        assert (reply["success"], reply["head"]["ok"]) == (True, False)
        assert [error["type"] for error in reply["head"]["errors"]] == [kind]
        assert deltas[-1]["set"]["rewards"] == {"reward": None}


async def test_what_a_broken_attempt_left_is_no_part_of_the_trace(tmp_path: Path) -> None:
    numbers = count()

    def breaks_once(request: dict[str, Any]) -> Any:
        return call(("guess", {"number": 0})) if next(numbers) == 1 else no_tokens(request)

    async with ScriptedServer(breaks_once) as model, prime(tmp_path, max_infra_retries=1) as client:
        (delta,), reply = await client.run(1, model.base_url)
        assert (reply["head"]["ok"], len(delta["nodes"]), len(delta["calls"])) == (True, 7, 3)


async def test_requests_that_cannot_be_answered_say_why(tmp_path: Path) -> None:
    async with prime(tmp_path) as client:
        for wanted, ask in (
            ("no method 'dance'", client.send("dance")),
            ("no task 9", client.ask(9, "http://127.0.0.1:9/v1")),
            ("headers_from_env", client.ask(0, "http://127.0.0.1:9/v1", headers_from_env={"X-Team": "TEAM"})),
            ("openai.api_key", client.ask(0, "http://127.0.0.1:9/v1", headers={"Authorization": "Bearer a"})),
            ("task_data", client.send("run", model="m")),
        ):
            await ask
            _, reply = await client.answer()
            assert reply["success"] is False and wanted in reply["error"]
        await client.send("health")
        assert (await client.answer())[1]["success"] is True
        _, reply = await client.run(0, "http://127.0.0.1:9/v1")
        assert [error["type"] for error in reply["head"]["errors"]] == ["ProviderError"]


async def test_a_cancelled_run_closes_its_session(tmp_path: Path) -> None:
    asked = asyncio.Event()

    async def waits(_: dict[str, Any]) -> Any:
        asked.set()
        await asyncio.sleep(600)

    async with ScriptedServer(waits) as model, prime(tmp_path) as client:
        number = await client.ask(0, model.base_url)
        await asked.wait()
        assert Halves.open_sessions == 1
        await client.send("cancel", request_id=number)
        replies = [(await client.answer())[1] for _ in range(2)]
        assert sorted(reply["success"] for reply in replies) == [False, True]
        assert Halves.open_sessions == 0
