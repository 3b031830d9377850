"""What ties a completion to what its server did: the prompt that it saw, its tokenizer, and that it sampled at all."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from engine_bench import FAKED, bench
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

import lachesis_client.http_attempts as http_attempts_module
import lachesis_client.http_client as http_client
import lachesis_tokens.prompts.tokenizer_proof as tokenizer_proof_module
from backends.hugging_face import dataset_problem
from lachesis.settings.server_settings import ServerConfigError
from lachesis_client import BadResponse, ServerUnavailable
from lachesis_client.sampling import Sampling
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import FakeServer, fake_tokenizer, letter_swapped
from lachesis_tokens.engines import Generation, create_engine
from lachesis_tokens.engines.atropos import AtroposEngine
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.prompts.tokenizer_proof import TokenizerProof, TokenizersDiffer
from lachesis_tokens.samples.group_shapes import (
    GroupSettings,
    RejectedGroup,
    RolloutSamples,
    TrainingGroup,
    build_group,
)
from lachesis_tokens.samples.samples import samples
from lachesis_tokens.samples.verification import verify_records
from lachesis_tokens.server.replays import ReplayGuard
from lachesis_tokens.server.serving import named_tokenizer
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.wire.service import WebService, json_response
from tests.support.ports import free_port

PROMPT = [5, 6, 7, 8]
ASKED = [{"role": "user", "content": "When is the tide high?"}]


def token_server(server: FakeServer, kind: str = "vllm", **settings: Any) -> TokenServer:
    return TokenServer([create_engine(kind, server.settings(**settings))], PromptBuilder(fake_tokenizer()), "hermes")


async def group_of(server: TokenServer, **settings: Any) -> TrainingGroup | RejectedGroup:
    rollouts = []
    for reward in (0.0, 1.0):
        managed = server.for_rollout()
        await managed.chat(ASKED)
        name = f"r{reward:g}"
        rollouts.append(RolloutSamples(name, reward, samples(managed, rollout_id=name, outcome="completed")))
    return build_group(rollouts, GroupSettings(2, **settings))


async def test_tokens_after_a_prompt_that_nobody_confirmed_are_not_trained() -> None:
    hidden = ["truncated_prompt", "no_echo", "no_usage"]
    async with FakeServer(faults=hidden, vary=True) as server, token_server(server) as tokens:
        refused = await group_of(tokens)
        assert isinstance(refused, RejectedGroup), f"{refused.delivered} tokens after prompts that the server never saw"
        assert refused.reason.value == "unchecked_prompts"
        assert "neither the ids nor the number of tokens" in refused.detail
        assert "--env.unchecked_prompts allow" in refused.detail
        allowed = await group_of(tokens, unchecked_prompts="allow")
        assert isinstance(allowed, TrainingGroup)
        totals = verify_records(sample.to_record() for sample in allowed.samples)
        assert totals.ok
        assert totals.unchecked == totals.delivered > 0


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", FAKED)
@pytest.mark.parametrize("hidden", [[], ["no_echo"], ["no_usage"], ["no_echo", "no_usage"]], ids="+".join)
async def test_a_span_records_how_far_its_prompt_was_checked(kind: str, hidden: list[str]) -> None:
    counts = kind != "atropos" and "no_usage" not in hidden
    level = "ids" if "no_echo" not in hidden else "length" if counts else "none"
    for n in (1, 3):
        async with bench(kind, None, faults=hidden) as it:
            for one in await it.engine.generate(PROMPT, Sampling(max_tokens=4), n=n):
                assert one.prompt_checked == level
        async with bench(kind, None, faults=["truncated_prompt", *hidden]) as it:
            if level != "none":
                with pytest.raises(BadResponse, match="sampled after 2"):
                    await it.engine.generate(PROMPT, Sampling(max_tokens=4), n=n)


async def test_the_count_is_compared_also_where_the_ids_are_repeated() -> None:
    """A front end may repeat what it received, and pass on less."""

    async with bench("vllm", None) as it:
        prompt = await it.chat("Hi")
        answer = await it.engine.send(it.engine.url, it.engine.payload(PromptIds(prompt), Sampling(max_tokens=4), 1))
        answer.body["usage"]["prompt_tokens"] -= 1
        with pytest.raises(BadResponse, match=f"sampled after {len(prompt) - 1}"):
            it.engine.read(answer.body, PromptIds(prompt))


class Gateway(WebService):
    """Adds to each answer the request that it received, as compact JSON."""

    def __init__(self, server: FakeServer) -> None:
        super().__init__()
        self.server = server

    def routes(self) -> Iterable[web.RouteDef]:
        return [web.post("/{path:.*}", self.passed_on)]

    async def passed_on(self, request: web.Request) -> web.Response:
        asked = await request.json()
        url = self.server.root_url + request.path
        async with aiohttp.ClientSession() as session, session.post(url, json=asked) as answer:
            body = await answer.json()
        for each in body if isinstance(body, list) else [body]:
            each["request"] = {**asked, "prompt_token_ids": PROMPT}
        return json_response(body)


@pytest.mark.parametrize("kind", FAKED)
async def test_a_request_that_comes_back_inside_an_answer_confirms_nothing(kind: str) -> None:
    """That says nothing of what the model saw."""
    async with FakeServer(faults=["truncated_prompt", "no_echo", "no_usage"]) as server, Gateway(server) as gateway:
        engine = create_engine(kind, replace(server.settings(), base_url=gateway.base_url))
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert one.prompt_checked == "none"
        await engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_every_choice_that_repeats_a_prompt_repeats_the_one_that_was_sent(kind: str) -> None:
    async with bench(kind, None) as it:
        prompt = PromptIds(PROMPT)
        answer = await it.engine.send(it.engine.url, it.engine.payload(prompt, Sampling(max_tokens=4), 2))
        answer.body.get("choices", answer.body.get("array"))[1]["prompt_token_ids"] = [5, 6, 7, 9]
        with pytest.raises(BadResponse, match="id 3 was sent as 8 and came back as 9"):
            it.engine.read(answer.body, prompt)


# Replayed answers.


async def test_a_cached_answer_is_not_trained_twice() -> None:
    async with FakeServer(faults=["replayed"], vary=True) as server, token_server(server) as tokens:
        for _ in range(3):
            group = await group_of(tokens)
            assert isinstance(group, TrainingGroup)
            ids = [sample.tokens for sample in group.samples]
            assert ids[0] != ids[1], "one completion trained twice"
        sampled = [tuple(made.ids) for seen in server.requests for made in seen.completions]
        assert len(sampled) == 6  # each group is of two completions that the server really made


async def test_a_cache_that_cannot_be_passed_is_an_error_that_names_it() -> None:
    async with FakeServer(faults=["replayed_prompt"], vary=True) as server, token_server(server) as tokens:
        await tokens.for_rollout().chat(ASKED)
        with pytest.raises(BadResponse, match=r"cmpl-\w+ repeats an earlier answer.*cache"):
            await tokens.for_rollout().chat(ASKED)


class Named(AtroposEngine):
    """An engine whose server names its answers as `names` says."""

    kind = "named"
    names: Callable[[int], str] = staticmethod("chatcmpl-{}".format)
    asked = 0

    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        self.asked += 1
        return [replace(one, completion_id=self.names(self.asked - 1)) for one in super().read(body, prompt)]


@pytest.mark.parametrize("names", [lambda number: "chatcmpl-0", lambda number: f"{number % 3}"], ids=["one", "from 0"])
async def test_names_that_say_nothing_are_no_sign_of_a_cache(names: Callable[[int], str]) -> None:
    """One name for all answers, or numbers that begin again: equal answers to one prompt are two samples."""
    async with FakeServer("Yes.") as server:
        engine = Named(server.settings())
        engine.names = names  # type: ignore[method-assign]
        async with TokenServer([engine], PromptBuilder(fake_tokenizer()), "hermes") as tokens:
            for question in ("Is it?", "Is it?", "Is it?", "Really?", "Is it?", "Is it?"):
                await tokens.for_rollout().chat([{"role": "user", "content": question}])
    assert server.stats["requests"] <= 12


async def test_a_likely_answer_is_not_made_rarer_where_names_repeat() -> None:
    """A server that names its answers by their prompt: to take only what differs would be a choice."""
    said = iter(["Yes.", "Yes.", "No."])
    async with FakeServer(lambda ask: next(said)) as server:
        engine = Named(server.settings())
        engine.names = lambda number: "of this prompt"  # type: ignore[method-assign]
        async with TokenServer([engine], PromptBuilder(fake_tokenizer()), "hermes") as tokens:
            answers = [await tokens.for_rollout().chat(ASKED) for _ in range(2)]
    assert [answer.message.text for answer in answers] == ["Yes.", "Yes."]
    assert answers[1].attempts == 2


@pytest.mark.parametrize("how", [{"seed": 7}, {"temperature": 0.0}], ids=str)
async def test_requests_that_are_meant_to_repeat_are_asked_once(how: dict[str, Any]) -> None:
    async with FakeServer(faults=["replayed"]) as server, token_server(server) as tokens:
        first, second = [await tokens.for_rollout().chat(ASKED, **how) for _ in range(2)]
    assert first.tokens is not None and second.tokens is not None
    assert first.tokens.ids == second.tokens.ids
    assert server.stats["requests"] == 2


async def test_the_choices_of_one_answer_share_its_name_and_may_be_equal() -> None:
    async with FakeServer("Yes.") as server, token_server(server) as tokens:
        prompt = TokenPrefix(PROMPT)
        for _ in range(2):
            assert len(await tokens.generate(prompt, Sampling(max_tokens=4), n=4)) == 4
    assert server.stats["requests"] == 2


async def test_what_is_remembered_is_bounded() -> None:
    guard = ReplayGuard(kept=3)
    async with bench("vllm", None) as it:
        for _ in range(9):
            prompt, sampling = PromptIds(PROMPT), Sampling(max_tokens=2)
            assert not guard.repeated(it.engine, prompt, sampling, await it.engine.generate(prompt, sampling))
    assert len(guard._seen) == 3


# The tokenizer.


@pytest.mark.sample(2)
@pytest.mark.parametrize("absent", [[], ["/tokenize"]], ids=["tokenize", "echo"])
@pytest.mark.parametrize("kind", FAKED)
async def test_another_tokenizer_is_noticed_and_named(kind: str, absent: list[str]) -> None:
    async with FakeServer(absent=absent) as server:
        async with token_server(server, kind) as tokens:
            assert await tokens.tokenizer_proof.prove(tokens.servers[0])
        for wrong in (letter_swapped(fake_tokenizer()), with_one_more_token()):
            proof = TokenizerProof(wrong, "theirs", "openai.tokenizer_name")
            with pytest.raises(TokenizersDiffer, match=r"'fake' has another tokenizer than theirs \(openai.*ids"):
                await proof.prove(create_engine(kind, server.settings()))


def with_one_more_token() -> Any:
    tokenizer = fake_tokenizer()
    tokenizer.add_tokens(["<sort>"], special_tokens=True)
    return tokenizer


async def test_a_server_that_says_nothing_of_its_tokenizer_is_not_called_proven() -> None:
    class NoTokenizer:
        """An engine of somebody's own, with the methods that the protocol asks for."""

        base_url = "http://x/v1"

    proof = TokenizerProof(letter_swapped(fake_tokenizer()))
    assert not await proof.prove(NoTokenizer())  # type: ignore[arg-type]
    for kind in FAKED:
        async with FakeServer(absent=["/tokenize"], faults=["no_echo"]) as server:
            assert not await proof.prove(create_engine(kind, server.settings()))
    async with FakeServer(faults=["server_error"], absent=["/tokenize"]) as server:
        assert not await proof.prove(create_engine("vllm", server.settings(max_retries=0)))


async def test_a_server_that_comes_back_with_another_tokenizer_is_not_used() -> None:
    port = free_port()
    async with FakeServer(port=port) as server:
        tokens = token_server(server)
        assert await tokens.tokenizer_proof.prove(tokens.servers[0])
        await tokens.for_rollout().chat(ASKED)
    async with tokens:
        with pytest.raises(ServerUnavailable):
            await tokens.servers[0].generate(PROMPT, Sampling(max_tokens=2), max_retries=0)
        async with FakeServer(tokenizer=letter_swapped(fake_tokenizer()), port=port):
            with pytest.raises(TokenizersDiffer, match="another tokenizer"):
                await tokens.for_rollout().chat(ASKED)
        async with FakeServer(port=port) as again:
            assert (await tokens.for_rollout().chat(ASKED)).tokens is not None
            assert again.stats["requests"] == 1


async def test_a_model_that_came_while_nobody_asked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rollouts may all be in their tools while a server starts again: no request fails."""
    port = free_port()
    async with FakeServer(port=port) as server:
        tokens = token_server(server)
        assert await tokens.tokenizer_proof.prove(tokens.servers[0])
        await tokens.for_rollout().chat(ASKED)
    monkeypatch.setattr(http_client, "_RESTART", 0.0)
    async with tokens:
        async with FakeServer(tokenizer=without(fake_tokenizer(), "<|im_end|>"), port=port):
            with pytest.raises(TokenizersDiffer, match=r"run are .*im_end"):
                await tokens.for_rollout().chat(ASKED)
        async with FakeServer(absent=["/tokenize"], faults=["no_echo"], port=port):
            with pytest.raises(ServerUnavailable, match="does not say how it splits text any more"):
                await tokens.for_rollout().chat(ASKED)


def without(tokenizer: Any, *texts: str) -> Any:
    """A tokenizer to which some added tokens are plain text."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [added for added in state["added_tokens"] if added["content"] not in texts]
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))


async def test_special_tokens_that_only_one_side_has_are_noticed() -> None:
    tokenizer = fake_tokenizer()
    async with FakeServer() as server:  # it has a newer tokenizer than the run
        with pytest.raises(TokenizersDiffer, match="<think"):
            await TokenizerProof(without(tokenizer, "<think>", "</think>")).prove(server_engine(server))
    specials = tokenizer.get_added_vocab()
    async with FakeServer(tokenizer=without(tokenizer, *specials)) as server:
        assert not await TokenizerProof(tokenizer).prove(server_engine(server))  # or its route takes no text for them


async def test_the_tokens_of_the_template_are_compared_also_where_thousands_are_added() -> None:
    """Gemma has 6,400 `<unused0>` and the like."""
    ours = fake_tokenizer()
    ours.add_tokens([f"<unused{number}>" for number in range(3000)])
    state = json.loads(ours.backend_tokenizer.to_str())
    swapped = {"<|im_start|>": "<|im_end|>", "<|im_end|>": "<|im_start|>"}
    for added in state["added_tokens"]:
        added["content"] = swapped.get(added["content"], added["content"])
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)))
    async with FakeServer(tokenizer=theirs) as server:
        with pytest.raises(TokenizersDiffer, match="im_start"):
            await TokenizerProof(ours).prove(server_engine(server))


@pytest.mark.parametrize("fault", [500, "hang"])
async def test_a_proxy_that_does_not_know_the_route_is_asked_for_an_echo(
    fault: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_proof_module, "_PATIENCE", 0.5)
    monkeypatch.setattr(http_attempts_module, "_FIRST_DELAY", 0.001)
    async with FakeServer() as server, Proxy(server, fault) as proxy:
        engine = create_engine("vllm", replace(server.settings(), base_url=proxy.base_url))
        assert await TokenizerProof(fake_tokenizer()).prove(engine) is (fault == 500)
        if fault == 500:
            with pytest.raises(TokenizersDiffer):
                await TokenizerProof(letter_swapped(fake_tokenizer())).prove(engine)
        await engine.close()


class Proxy(Gateway):
    """Passes on `/v1` alone."""

    def __init__(self, server: FakeServer, fault: int | str) -> None:
        super().__init__(server)
        self.fault = fault

    async def passed_on(self, request: web.Request) -> web.Response:
        if request.path.startswith("/v1/"):
            return await super().passed_on(request)
        if self.fault == "hang":
            await asyncio.Event().wait()
        return json_response({"error": "no such route"}, 500)


def server_engine(server: FakeServer) -> Any:
    return create_engine("vllm", server.settings())


def test_a_hub_that_refuses_is_asked_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    with pytest.raises(ServerConfigError, match=f"it is not in the cache, and {hub} cannot be reached"):
        named_tokenizer("nobody/nothing", "env.tokenizer_name")


def test_a_dataset_is_looked_for_in_the_cache_before_the_hub_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("datasets")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        hub = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    assert dataset_problem("Some-One/Data_Set").startswith(f"it is not in the cache, and {hub} cannot be reached")
    (tmp_path / "some-one___data_set").mkdir()
    assert dataset_problem("Some-One/Data_Set") == ""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert dataset_problem("some/other") == "it is not in the cache, and HF_HUB_OFFLINE is set"
