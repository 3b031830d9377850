"""The fake model server: it reports what its model says, in the fields of the imitated servers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import signal
import sys
from contextlib import asynccontextmanager
from random import Random

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from lachesis_client import (
    ContextExhausted,
    OpenAIServer,
    RequestRejected,
    ServerSettings,
    ServerUnavailable,
    Unauthorized,
)
from lachesis_client import http_attempts as http_attempts_module
from lachesis_client.sampling import Sampling
from lachesis_messages.messages import FinishReason
from lachesis_messages.tokens import TokenPrefix
from lachesis_testing.fake_server import (
    Codec,
    Echo,
    FakeModel,
    FakeServer,
    Fault,
    Lengths,
    RandomTokens,
    RandomWords,
    Reply,
    Scripted,
    ToolUser,
    fake_tokenizer,
)
from lachesis_testing.fake_server.faults import TOKENS, WIRE
from tests.run import some

TOKENIZER = fake_tokenizer()
CODEC = Codec(TOKENIZER)
END = TOKENIZER.eos_token_id
TOOL = {
    "type": "function",
    "function": {
        "name": "terminal",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
ASK = [{"role": "user", "content": "How many apples are left?"}]
PROMPT = CODEC.encode(CODEC.render(ASK, None))


class Wire:
    """Plain HTTP to a fake server."""

    def __init__(self, server, session):
        self.server, self.session = server, session

    async def post(self, path, body, **more):
        async with self.session.post(self.server.root_url + path, json=body, **more) as response:
            return response.status, orjson.loads(await response.read())

    async def get(self, path):
        async with self.session.get(self.server.root_url + path) as response:
            return response.status, await response.read()


@asynccontextmanager
async def serving(*arguments, **named):
    async with (
        FakeServer(*arguments, **{"tokenizer": TOKENIZER, **named}) as server,
        aiohttp.ClientSession() as session,
    ):
        yield Wire(server, session)


def vllm(prompt, n=1, max_tokens=32, **sampling):
    more = {"logprobs": 0, "return_token_ids": True, "skip_special_tokens": False}
    return "/v1/completions", {"prompt": prompt, "n": n, "max_tokens": max_tokens, **more, **sampling}


def vllm_generate(prompt, n=1, max_tokens=32, **sampling):
    more = {"n": n, "max_tokens": max_tokens, "logprobs": 0, **sampling}
    return "/inference/v1/generate", {"token_ids": prompt, "sampling_params": more, "return_token_ids": True}


def sglang(prompt, n=1, max_tokens=32, **sampling):
    more = {"n": n, "max_new_tokens": max_tokens, **sampling}
    return "/generate", {"input_ids": prompt, "sampling_params": more, "return_logprob": True}


def atropos(prompt, n=1, max_tokens=32, **sampling):
    more = {"n": n, "max_tokens": max_tokens, "logprobs": 0, **sampling}
    return "/generate", {"prompt": {"prompt_token_ids": prompt}, **more}


def read(api, body):
    """(ids, logprobs, finish reason) of each completion, as a client finds them."""
    if api is vllm:
        return [(c["token_ids"], c["logprobs"]["token_logprobs"], c["finish_reason"]) for c in body["choices"]]
    if api is vllm_generate:
        return [
            (c["token_ids"], [each["logprob"] for each in c["logprobs"]["content"]], c["finish_reason"])
            for c in body["choices"]
        ]
    if api is sglang:
        found = []
        for answer in body if isinstance(body, list) else [body]:
            triples = answer["meta_info"]["output_token_logprobs"]
            assert [triple[1] for triple in triples] == answer["output_ids"]
            found.append((answer["output_ids"], [t[0] for t in triples], answer["meta_info"]["finish_reason"]["type"]))
        return found
    read_ids = [[int(next(iter(token[0]))) for token in each] for each in body["logprobs"]]
    read_logprobs = [[next(iter(token[0].values())) for token in each] for each in body["logprobs"]]
    return list(zip(read_ids, read_logprobs, body["finish_reasons"], strict=True))


VOCABULARY_DIGEST = "c98a03b187820f24"
APIS = pytest.mark.parametrize("api", [vllm, vllm_generate, sglang, atropos])


class TestTokenizer:
    def test_its_ids_are_the_same_everywhere(self):
        backend = TOKENIZER.backend_tokenizer
        by_id = [backend.id_to_token(index) for index in range(len(TOKENIZER))]
        assert len(by_id) == 1409
        assert hashlib.sha256("\n".join(by_id).encode()).hexdigest()[:16] == VOCABULARY_DIGEST

    @given(st.text())
    def test_any_text_survives(self, text):
        ids = CODEC.encode(text)
        assert CODEC.decode(ids) == text == TOKENIZER.decode(ids)

    @given(st.lists(st.integers(0, len(TOKENIZER) - 1)), st.booleans())
    def test_any_ids_decode_as_transformers_decodes_them(self, ids, skip):
        assert CODEC.decode(ids, skip_special=skip) == TOKENIZER.decode(ids, skip_special_tokens=skip)

    def test_special_tokens_are_one_id_and_can_be_spelled_in_others(self):
        assert CODEC.encode("<|im_end|>") == [END]
        spelled = CODEC.spell("<|im_end|>")
        assert END not in spelled and CODEC.decode(spelled) == "<|im_end|>"

    def test_turns_of_the_model_are_counted_from_ids(self):
        messages = [
            *ASK,
            {"role": "assistant", "content": "\n\nSeven."},
            {"role": "user", "content": "<|im_start|>assistant"},
        ]
        assert CODEC.turns(PROMPT) == 0
        ids = [*PROMPT, *CODEC.encode("\n\nSeven."), END, *CODEC.encode("\n<|im_start|>user\nSure?<|im_end|>\n")]
        assert CODEC.turns([*ids, *CODEC.encode("<|im_start|>assistant\n")]) == 1
        assert CODEC.turns(CODEC.encode(CODEC.render(messages[:2], None))) == 1


class TestModel:
    MODEL = FakeModel(1409, seed=3, end_ids=[END], mean_length=20)

    @given(st.lists(st.integers(0, 1408), max_size=8), st.integers(0, 1408), st.floats(0.2, 3))
    @settings(max_examples=some(20))
    def test_a_logprob_is_the_documented_formula_of_the_whole_prefix(self, prefix, index, temperature):
        row = int(TokenPrefix(prefix).digest[:8], 16) % 256
        words = hashlib.shake_256(f"3/{row}".encode()).digest(4 * 1409)
        logits = [8.0 * int.from_bytes(words[4 * i : 4 * i + 4], "little") / 2**32 for i in range(1409)]
        others = sum(math.exp(logit) for i, logit in enumerate(logits) if i != END)
        logits[END] = math.log(others / 19)  # probability 1/20
        for kind, divisor in (("raw", 1.0), ("temperature", temperature), ("processed", temperature)):
            total = math.log(sum(math.exp(logit / divisor) for logit in logits))
            sampling = Sampling(max_tokens=1, temperature=temperature)
            assert self.MODEL.score(prefix, [index], sampling, kind) == pytest.approx(
                [logits[index] / divisor - total], abs=1e-9
            )

    @pytest.mark.parametrize("cut", [{"top_k": 5}, {"top_p": 0.3}, {"min_p": 0.5}, {"top_k": 50, "top_p": 0.5}])
    def test_only_what_truncation_leaves_is_sampled(self, cut):
        sampling, rng = Sampling(max_tokens=1, temperature=0.8, **cut), Random(1)
        every = range(1409)
        scores = [self.MODEL.score([7], [index], sampling, "processed")[0] for index in every]
        kept = {index for index in every if scores[index] > -9000}
        assert sum(math.exp(scores[index]) for index in kept) == pytest.approx(1.0)
        drawn = [self.MODEL.sample([7], sampling, rng, limit=1, kind="processed") for _ in range(300)]
        assert {ids[0] for ids, _ in drawn} <= kept and len(kept) < 1409
        assert all(logprobs == [scores[ids[0]]] for ids, logprobs in drawn)

    def test_samples_follow_the_distribution(self):
        sampling, rng, count = Sampling(max_tokens=1, temperature=0.5), Random(2), 20_000
        drawn = [self.MODEL.sample([1, 2], sampling, rng, limit=1)[0][0] for _ in range(count)]
        for index in sorted(set(drawn), key=drawn.count, reverse=True)[:5]:
            expected = count * math.exp(self.MODEL.score([1, 2], [index], sampling, "processed")[0])
            assert abs(drawn.count(index) - expected) < 5 * math.sqrt(expected)

    def test_temperature_0_takes_the_likeliest(self):
        sampling = Sampling(max_tokens=3, temperature=0)
        ids, logprobs = self.MODEL.sample([5], sampling, Random(0), limit=3)
        assert ids == self.MODEL.sample([5], sampling, Random(1), limit=3)[0]
        assert [best[0] for best in self.MODEL.top([5], ids, sampling, "raw", 1)] == [
            pytest.approx(pair) for pair in zip(ids, logprobs, strict=True)
        ]


class TestTokenRoutes:
    @APIS
    @pytest.mark.parametrize("policy", [RandomTokens(), RandomWords(), RandomTokens(Lengths(3, 40))])
    async def test_ids_and_logprobs_are_what_the_model_says(self, api, policy):
        async with serving(policy) as wire:
            sampling = Sampling(max_tokens=32, temperature=0.7)
            path, body = api(PROMPT, n=3, temperature=0.7)
            status, answer = await wire.post(path, body)
            assert status == 200
            kind = "temperature" if api is sglang else "raw"
            (seen,) = wire.server.requests
            assert seen.state == "answered" and list(seen.call.prompts[0]) == PROMPT
            completions = read(api, answer)
            assert len(completions) == 3
            for (ids, logprobs, reason), made in zip(completions, seen.completions, strict=True):
                assert (ids, logprobs, reason) == (made.ids, made.logprobs, made.finish_reason)
                assert logprobs == pytest.approx(wire.server.model.score(PROMPT, ids, sampling, kind))
                assert (reason == "stop") == (ids[-1] == END)
                assert len(ids) == 32 or reason == "stop"
            assert len({tuple(ids) for ids, _, _ in completions}) == 3

    @APIS
    async def test_processed_logprobs_are_of_the_truncated_distribution(self, api):
        async with serving(RandomTokens(), logprobs_mode="processed") as wire:
            sampling = Sampling(max_tokens=16, temperature=0.7, top_k=20)
            _, answer = await wire.post(*api(PROMPT, max_tokens=16, temperature=0.7, top_k=20))
            ((ids, logprobs, _),) = read(api, answer)
            kind = "temperature" if api is sglang else "processed"
            assert logprobs == pytest.approx(wire.server.model.score(PROMPT, ids, sampling, kind))

    @APIS
    async def test_the_same_prompt_gets_the_same_answer_unless_varied(self, api):
        seeded = {"sampling_seed" if api is sglang else "seed": 5}
        for vary, sampling, same in ((False, {}, True), (True, {}, False), (True, seeded, True)):
            async with serving(RandomTokens(), vary=vary) as wire:
                answers = [read(api, (await wire.post(*api(PROMPT, **sampling)))[1]) for _ in range(2)]
            assert (answers[0] == answers[1]) == same

    @APIS
    async def test_a_stop_text_ends_the_completion_with_its_token(self, api):
        async with serving(Scripted("one two three four")) as wire:
            _, answer = await wire.post(*api(PROMPT, stop=["three", "four"]))
            ((ids, logprobs, reason),) = read(api, answer)
            assert reason == "stop" and len(ids) == len(logprobs)
            assert CODEC.decode(ids) == "one two three"
            made = wire.server.requests[-1].completions[0]
            assert (made.text, made.stop_reason) == ("one two ", "three")

    @APIS
    async def test_stop_ids_and_ignored_ends(self, api):
        script = Reply([*CODEC.encode("a"), END, *CODEC.encode("b c"), END], as_is=False)
        async with serving(Scripted(script)) as wire:
            assert read(api, (await wire.post(*api(PROMPT)))[1])[0][0] == [*CODEC.encode("a"), END]
            ids = read(api, (await wire.post(*api(PROMPT, ignore_eos=True)))[1])[0][0]
            assert ids == list(script.ids)
            stop = CODEC.encode("a")
            assert read(api, (await wire.post(*api(PROMPT, stop_token_ids=stop)))[1])[0][0] == stop

    @APIS
    async def test_a_prompt_that_does_not_fit_is_rejected_in_the_servers_words(self, api):
        async with serving(context_length=40) as wire:
            assert (await wire.post(*api([1, 2, 3], max_tokens=8)))[0] == 200
            path, body = api(list(range(41)), max_tokens=8)
            async with wire.session.post(wire.server.root_url + path, json=body) as response:
                status, text = response.status, await response.text()
        if api is atropos:  # an unhandled ValueError there
            assert (status, text) == (500, "Internal Server Error")
        else:
            assert status == 400
            assert "context length" in text or "maximum model length" in text

    @APIS
    async def test_the_context_ends_a_completion(self, api):
        async with serving(RandomTokens(Lengths(100, 100)), context_length=40, mean_length=1e12) as wire:
            path, body = api([1, 2, 3], max_tokens=37 if api is sglang else 200)
            _, answer = await wire.post(path, body)
            assert [(len(ids), reason) for ids, _, reason in read(api, answer)] == [(37, "length")]

    @APIS
    async def test_ids_outside_the_vocabulary_are_rejected(self, api):
        async with serving() as wire:
            path, body = api([1, 5000])
            async with wire.session.post(wire.server.root_url + path, json=body) as response:
                assert response.status == (500 if api is atropos else 400)

    async def test_many_prompts_of_one_request_answer_in_order(self):
        async with serving(Echo()) as wire:
            texts = ["first", "second"]
            _, answer = await wire.post("/v1/completions", {"prompt": texts, "n": 2, "return_token_ids": True})
            assert [choice["text"] for choice in answer["choices"]] == ["first", "first", "second", "second"]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
            _, answer = await wire.post("/generate", {"text": texts, "sampling_params": {"n": 2}})
            assert [each["text"] for each in answer] == ["first", "first", "second", "second"]

    async def test_a_prompt_can_be_scored(self):
        async with serving() as wire:
            body = {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True}
            _, answer = await wire.post("/v1/completions", body)
            logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
            scored = wire.server.model.score(PROMPT[:1], PROMPT[1:], Sampling(max_tokens=1))
            assert logprobs == [None, *(pytest.approx(score) for score in scored)]

    async def test_vllm_top_logprobs_are_the_sampled_token_and_the_likeliest(self):
        async with serving(RandomTokens()) as wire:
            path, body = vllm(PROMPT, max_tokens=4)
            body |= {"logprobs": 3, "return_tokens_as_token_ids": True}
            (choice,) = (await wire.post(path, body))[1]["choices"]
            for index, token, best in zip(
                choice["token_ids"], choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"], strict=True
            ):
                assert token == f"token_id:{index}" == next(iter(best))
                assert 3 <= len(best) <= 4

    async def test_the_fields_are_those_of_the_real_servers(self):
        async with serving() as wire:
            _, answer = await wire.post(*vllm(PROMPT))
            assert set(answer) == {
                *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
                *("kv_transfer_params", "ec_transfer_params", "metrics"),
            }
            choice = answer["choices"][0]
            assert set(choice) == {
                *("index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs"),
                *("prompt_token_ids", "routed_experts", "weight_versions"),
            }
            assert choice["prompt_token_ids"] == PROMPT
            assert set(choice["logprobs"]) == {"text_offset", "token_logprobs", "tokens", "top_logprobs"}
            count = len(choice["token_ids"])
            assert answer["usage"] == {
                "prompt_tokens": len(PROMPT),
                "completion_tokens": count,
                "total_tokens": len(PROMPT) + count,
            }
            _, answer = await wire.post(*vllm_generate(PROMPT))
            assert answer["prompt_token_ids"] == PROMPT
            assert answer["choices"][0]["weight_versions"][0]["version"] == "default"
            _, answer = await wire.post(*sglang(PROMPT))
            assert set(answer) == {"text", "output_ids", "meta_info"}
            assert answer["meta_info"]["finish_reason"] in (
                {"type": "stop", "matched": END},
                {"type": "length", "length": 32},
            )
            assert answer["meta_info"]["weight_version"] == "default"
            _, answer = await wire.post(*atropos(PROMPT))
            assert set(answer) == {"text", "prompt", "finish_reasons", "logprobs", "prompt_token_ids", "token_ids"}

    @pytest.mark.parametrize(
        ("api", "sampling", "said"),
        [
            (vllm, {"temperature": -1}, "temperature must be non-negative"),
            (vllm, {"top_p": 0}, "top_p must be in (0, 1]"),
            (vllm, {"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling"),
            (vllm, {"max_tokens": 0}, "max_tokens must be at least 1"),
            (vllm, {"prompt": []}, "prompt"),
            (vllm, {"prompt": [1, -1]}, "token ids are whole numbers"),
            (sglang, {"top_k": 0}, "top_k must be -1 (disable), or at least 1"),
        ],
    )
    async def test_senseless_requests_are_rejected(self, api, sampling, said):
        async with serving() as wire:
            path, body = api(sampling.pop("prompt", PROMPT), **sampling)
            status, answer = await wire.post(path, body)
            assert status == 400 and said in answer["error"]["message"]

    async def test_atropos_knows_sampling_parameters_only(self):
        async with serving() as wire:
            path, body = atropos(PROMPT)
            async with wire.session.post(wire.server.root_url + path, json={**body, "model": "fake"}) as response:
                assert (response.status, await response.text()) == (500, "Internal Server Error")

    async def test_a_policy_that_raises_is_a_400_with_its_error(self):
        def broken(ask):
            raise KeyError("no such entry")

        async with serving(broken) as wire:
            status, answer = await wire.post(*vllm(PROMPT))
            assert status == 400 and "KeyError: 'no such entry'" in answer["error"]["message"]

    async def test_another_kind_of_tokenizer(self):
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        special = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        backend.train_from_iterator(["the cat sat on the mat"] * 3, trainers.BpeTrainer(special_tokens=special))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
        async with serving(Scripted("the cat"), tokenizer=tokenizer) as wire:
            _, answer = await wire.post(*vllm([3, 4]))
            ((ids, logprobs, reason),) = read(vllm, answer)
            assert ids == [*tokenizer.encode("the cat"), tokenizer.eos_token_id] and reason == "stop"
            assert answer["choices"][0]["text"].strip() == "the cat"
            assert logprobs == pytest.approx(wire.server.model.score([3, 4], ids, Sampling(max_tokens=1)))

    async def test_new_weights_answer_under_their_version(self):
        async with serving(RandomTokens()) as wire:
            first = read(sglang, (await wire.post(*sglang(PROMPT)))[1])
            wire.server.update_weights("step-2", seed=2)
            _, answer = await wire.post(*sglang(PROMPT))
            assert answer["meta_info"]["weight_version"] == "step-2"
            assert orjson.loads((await wire.get("/weight_info"))[1]) == {"weight_version": "step-2"}
            assert read(sglang, answer) != first


COUNTING = "one two three four five six seven eight nine ten"


class TestUpdates:
    """Weight updates in mid-completion, through the routes of vLLM and of SGLang."""

    @pytest.mark.parametrize("api", [vllm, sglang])
    async def test_aborted_answers_are_partial_and_the_next_request_goes_on(self, api):
        text = f"{COUNTING} " * 5
        async with serving(Scripted(text), tokens_per_second=8.0) as wire:
            asked = asyncio.create_task(wire.post(*api(PROMPT, max_tokens=500)))
            await until(lambda: wire.server.stats["in_flight"] == 1)
            await asyncio.sleep(0.4)
            assert wire.server.abort_requests() == 1
            ((begun, logprobs, reason),) = read(api, (await asked)[1])
            wire.server.tokens_per_second = None
            assert reason == "abort" and 0 < len(begun) == len(logprobs)
            ((rest, _, reason),) = read(api, (await wire.post(*api([*PROMPT, *begun], max_tokens=500)))[1])
            assert rest and CODEC.decode([*begun, *rest]) == f"{text}<|im_end|>"
            assert reason == "stop" and wire.server.stats["aborted"] == 1

    @pytest.mark.parametrize(
        ("api", "pause", "load", "resume"),
        [
            (vllm, "/pause?mode=keep", "/collective_rpc", "/resume"),
            (sglang, "/pause_generation", "/update_weights_from_disk", "/continue_generation"),
        ],
    )
    async def test_frozen_requests_go_on_with_the_new_weights(self, api, pause, load, resume):
        async with serving(RandomTokens(), tokens_per_second=8.0) as wire:
            path, body = api(PROMPT, max_tokens=24, ignore_eos=True)
            asked = asyncio.create_task(wire.post(path, {**body, "return_weight_versions": True}))
            await until(lambda: wire.server.stats["in_flight"] == 1)
            await asyncio.sleep(0.3)
            assert (await wire.post(pause, {"mode": "retract"}))[0] == 200
            wire.server.tokens_per_second = None
            waiting = asyncio.create_task(wire.post(*api(PROMPT, max_tokens=2)))
            old = wire.server.model
            reload = {"method": "reload_weights", "kwargs": {"weights_path": "/new"}}
            assert (await wire.post(load, {**reload, "model_path": "/new", "weight_version": "8"}))[0] == 200
            await wire.post("/update_weight_version", {"new_version": "8"})
            assert orjson.loads((await wire.get("/is_paused"))[1]) == {"is_paused": True}
            assert not asked.done() and not waiting.done()
            await wire.post(resume, {})
            answer = (await asked)[1]
            ((ids, logprobs, reason),) = read(api, answer)
            listed = (answer["meta_info"] if api is sglang else answer["choices"][0])["weight_versions"]
            assert [span["version"] for span in listed] == ["default", "8"] and reason == "length"
            middle, new = listed[0]["end"], wire.server.model
            assert listed[1] == {"version": "8", "start": middle, "end": 24} and len(ids) == 24
            sampling = Sampling(max_tokens=24)
            scored = old.score(PROMPT, ids[:middle], sampling) + new.score(
                [*PROMPT, *ids[:middle]], ids[middle:], sampling
            )
            assert logprobs == pytest.approx(scored)
            assert (await waiting)[0] == 200

    async def test_a_pause_that_waits_ends_also_if_requests_arrive_meanwhile(self):
        async with serving(Scripted(COUNTING), tokens_per_second=100.0, max_concurrency=1) as wire:
            early = [asyncio.create_task(wire.post(*vllm(PROMPT))) for _ in range(2)]
            await until(lambda: wire.server.stats["in_flight"] == 2)
            async with asyncio.timeout(60):
                pause = asyncio.create_task(wire.post("/pause?mode=wait", {}))
                await until(lambda: wire.server.flow.paused)
                late = asyncio.create_task(wire.post(*vllm(PROMPT)))
                assert (await pause)[0] == 200
            assert [read(vllm, answer)[0][2] for _, answer in await asyncio.gather(*early)] == ["stop", "stop"]
            assert not late.done() and wire.server.stats["completions"] == 2
            await wire.post("/resume", {})
            assert (await late)[0] == 200

    async def test_an_abort_is_answered_also_while_the_server_is_frozen(self):
        async with serving(Scripted(COUNTING), tokens_per_second=4.0) as wire:
            asked = [asyncio.create_task(wire.post(*vllm(PROMPT)))]
            await until(lambda: wire.server.stats["in_flight"] == 1)
            await wire.server.pause("keep")
            asked.append(asyncio.create_task(wire.post(*vllm(PROMPT))))
            await until(lambda: wire.server.stats["in_flight"] == 2)
            assert wire.server.abort_requests() == 2
            async with asyncio.timeout(60):
                answers = await asyncio.gather(*asked)
            assert [read(vllm, answer)[0][2] for _, answer in answers] == ["abort", "abort"]
            assert wire.server.flow.paused

    async def test_a_frozen_server_answers_no_request_whose_prompt_it_was_computing(self):
        async with serving(Scripted(COUNTING), prefill_tokens_per_second=len(PROMPT) / 0.3) as wire:
            asked = asyncio.create_task(wire.post(*vllm(PROMPT)))
            await until(lambda: wire.server.stats["in_flight"])
            await wire.server.pause("keep")
            await wire.server.ranks.prefill(0, PROMPT)  # its turn comes after that of the request
            wire.server.update_weights("8", seed=8)
            assert not wire.server.requests[0].completions
            wire.server.resume()
            assert (await asked)[0] == 200
            assert wire.server.requests[0].completions[0].versions == [("8", 0, 21)]

    @pytest.mark.parametrize("api", [vllm_generate, sglang])
    async def test_masks_and_likeliest_ids_are_those_of_the_model_that_sampled_the_token(self, api):
        named = {"sampling_mask": True, "logprobs_mode": "processed", "experts": (2, 2, 8)}
        async with serving(RandomTokens(), tokens_per_second=20.0, **named) as wire:
            path, body = api(PROMPT, max_tokens=24, top_k=5, ignore_eos=True)
            more = {"return_sampling_mask": True, "return_routed_experts": True} if api is sglang else {}
            asked = asyncio.create_task(wire.post(path, {**body, **more}))
            await until(lambda: wire.server.requests and wire.server.requests[0].completions)
            await asyncio.sleep(0.25)
            wire.server.update_weights("8", seed=8)
            answer = (await asked)[1]
            [made] = wire.server.requests[0].completions
            assert [version for version, *_ in made.versions] == ["default", "8"]
            if api is sglang:
                masks = answer["meta_info"]["output_token_sampling_mask"]
                logprobs = answer["meta_info"]["output_token_sampling_logprobs"]
            else:
                masks = answer["choices"][0]["sampling_mask"]
                logprobs = read(api, answer)[0][1]
            assert all(index in mask for index, mask in zip(made.ids, masks, strict=True))
            assert min(logprobs) > -20

    async def test_token_faults_count_once_and_hold_over_updates(self):
        async with serving(RandomTokens(), faults=["aborted"], tokens_per_second=40.0) as wire:
            bodies = [vllm([*PROMPT, place], max_tokens=400, ignore_eos=True) for place in range(8)]
            asked = [asyncio.create_task(wire.post(*body)) for body in bodies]
            await until(lambda: sum(bool(seen.completions) for seen in wire.server.requests) == 8)
            wire.server.update_weights("8", seed=8)  # before the first token
            await asyncio.sleep(0.05)
            wire.server.update_weights("9", seed=9)  # after the first tokens
            answers = await asyncio.gather(*asked)
            assert {read(vllm, answer)[0][2] for _, answer in answers} == {"abort"}
            assert wire.server.stats["faults.aborted"] == wire.server.stats["aborted"] == 8

    async def test_one_request_is_aborted_by_its_name(self):
        async with serving(Scripted(COUNTING), tokens_per_second=4.0) as wire:
            path, body = sglang(PROMPT)
            asked = [asyncio.create_task(wire.post(path, {**body, "rid": name})) for name in ("a", "b")]
            await until(lambda: wire.server.stats["in_flight"] == 2)
            await wire.post("/abort_request", {"rid": "b"})
            wire.server.tokens_per_second = None
            wire.server.update_weights("8", seed=8)  # the request in flight looks at the clock again
            reasons = [answer["meta_info"]["finish_reason"]["type"] for _, answer in await asyncio.gather(*asked)]
            assert reasons == ["stop", "abort"]

    async def test_what_is_wrong_is_named(self):
        async with serving() as wire:
            status, answer = await wire.post("/pause?mode=never", {})
            assert status == 400 and "abort, keep, wait" in answer["error"]
            assert (await wire.post("/collective_rpc", {"method": "sleep"}))[0] == 400


class TestChat:
    async def test_the_prompt_is_the_chat_templates(self):
        messages = [
            {"role": "system", "content": "Be brief."},
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [_call("ls")]},
            {"role": "tool", "tool_call_id": "call_1", "content": "a.txt"},
        ]
        async with serving() as wire:
            body = {
                "messages": messages,
                "tools": [TOOL],
                "logprobs": True,
                "top_logprobs": 2,
                "return_token_ids": True,
            }
            _, answer = await wire.post("/v1/chat/completions", body)
            expected = TOKENIZER.apply_chat_template(
                [*messages[:2], {**messages[2], "tool_calls": [_call({"command": "ls"})]}, messages[3]],
                tools=[TOOL],
                add_generation_prompt=True,
                tokenize=False,
            )
            assert CODEC.decode(answer["prompt_token_ids"]) == expected
            assert answer["prompt_token_ids"] == CODEC.encode(expected)
            (choice,) = answer["choices"]
            scored = wire.server.model.score(answer["prompt_token_ids"], choice["token_ids"], Sampling(max_tokens=1))
            content = choice["logprobs"]["content"]
            assert [each["logprob"] for each in content] == pytest.approx(scored)
            said = b"".join(bytes(each["bytes"]) for each in content).decode()
            assert said == choice["message"]["content"] + "<|im_end|>"

    async def test_the_tool_user_calls_tools_that_exist_and_then_answers(self):
        async with serving(ToolUser(turns=2)) as wire:
            client = OpenAIServer(wire.server.settings())
            messages = list(ASK)
            for turn in range(3):
                response = await client.chat(messages, tools=[TOOL])
                calls = response.message.tool_calls
                if turn == 2:
                    assert response.finish_reason is FinishReason.STOP and not calls and response.message.content
                    break
                assert response.finish_reason is FinishReason.TOOL_CALLS
                assert calls[0].name == "terminal" and json.loads(calls[0].arguments)["command"]
                messages += [response.message, {"role": "tool", "tool_call_id": calls[0].id, "content": "done"}]
            await client.close()

    async def test_the_tool_user_finds_the_tools_in_ids(self):
        async with serving(ToolUser(turns=1, calls=2, thinking=True)) as wire:
            prompt = CODEC.encode(CODEC.render(ASK, [TOOL]))
            _, answer = await wire.post(*vllm(prompt, max_tokens=400))
            text = answer["choices"][0]["text"]
            assert text.count('<tool_call>\n{"name": "terminal", "arguments": {"command": ') == 2
            assert text.startswith("<think>\n")

    async def test_scripts_by_turn_serve_any_number_of_conversations(self):
        async with serving(Scripted("one", "two", "three", by_turn=True)) as wire:
            client = OpenAIServer(wire.server.settings())

            async def talk():
                messages, said = list(ASK), []
                for _ in range(4):
                    said.append((await client.chat(messages)).message.content)
                    messages += [{"role": "assistant", "content": said[-1]}, {"role": "user", "content": "And?"}]
                return said

            assert await asyncio.gather(*(talk() for _ in range(5))) == [["one", "two", "three", "three"]] * 5
            await client.close()

    async def test_errors_become_the_clients_own(self):
        async with serving(api_key="secret", context_length=30) as wire:
            for overrides, error in (
                ({}, ContextExhausted),
                ({"api_key": "wrong"}, Unauthorized),
                ({"model_name": "other"}, RequestRejected),
            ):
                client = OpenAIServer(wire.server.settings(**overrides))
                with pytest.raises(error):
                    await client.chat([{"role": "user", "content": "long " * 40}])
                await client.close()


async def test_routes_about_the_server():
    async with serving() as wire:
        assert orjson.loads((await wire.get("/v1/models"))[1])["data"][0]["id"] == "fake"
        for path in ("/health", "/health_generate"):
            assert await wire.get(path) == (200, b"")
        assert orjson.loads((await wire.get("/get_model_info"))[1])["is_generation"] is True
        assert "version" in orjson.loads((await wire.get("/version"))[1])
        _, answer = await wire.post("/tokenize", {"prompt": "Hello <|im_end|>", "return_token_strs": True})
        assert answer["tokens"] == CODEC.encode("Hello <|im_end|>") and answer["count"] == len(answer["token_strs"])
        assert (await wire.post("/tokenize", {"messages": ASK}))[1]["tokens"] == PROMPT
        assert (await wire.post("/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": "Hello <|im_end|>"}
        assert wire.server.stats["requests"] == 0


class TestTokenFaults:
    SCRIPT = "Let me look at this: the question has an answer."

    async def spoiled(self, name, script=SCRIPT, count=20):
        """Completions with this fault, one for each of `count` prompts."""
        async with serving(Scripted(script), faults=[name]) as wire:
            for number in range(count):
                path, body = vllm([number, *PROMPT], max_tokens=200)
                assert (await wire.post(path, body))[0] == 200
            made = [seen.completions[0] for seen in wire.server.requests]
            for seen, completion in zip(wire.server.requests, made, strict=True):
                assert completion.faults == [name]
                score = wire.server.model.score(seen.call.prompts[0], completion.ids, Sampling(max_tokens=200))
                assert completion.logprobs == pytest.approx(score)
        return made

    async def test_ambiguous_splits_have_the_text_and_not_the_ids_of_the_encoder(self):
        for made in await self.spoiled("ambiguous"):
            assert CODEC.decode(made.ids) == self.SCRIPT + "<|im_end|>"
            assert made.ids != CODEC.encode(CODEC.decode(made.ids))

    async def test_ends_of_turn(self):
        body = CODEC.encode(self.SCRIPT)
        for name, ids in (
            ("no_end_of_turn", body),
            ("double_end_of_turn", [*body, END, END]),
            ("empty", [END]),
            ("no_tokens", []),
        ):
            assert {(tuple(made.ids), made.finish_reason) for made in await self.spoiled(name, count=2)} == {
                (tuple(ids), "stop")
            }

    async def test_special_tokens_real_and_spelled(self):
        specials = CODEC.special_ids - {END}
        for made in await self.spoiled("inner_special"):
            assert sum(index in specials for index in made.ids) == 1 and made.ids[-1] == END
        for made in await self.spoiled("spelled_special"):
            text = CODEC.decode(made.ids[:-1])
            assert any(CODEC.bytes_of[index].decode() in text for index in CODEC.special_ids)
            assert not CODEC.special_ids & set(made.ids[:-1])

    @pytest.mark.parametrize("name", ["broken_utf8_end", "broken_utf8_middle"])
    async def test_half_characters(self, name):
        for made in await self.spoiled(name):
            said = b"".join(CODEC.bytes_of[index] for index in made.ids[:-1])
            with pytest.raises(UnicodeDecodeError) as caught:
                said.decode()
            assert (caught.value.end == len(said)) == (name == "broken_utf8_end")
            assert "\ufffd" in made.text

    async def test_tool_calls_are_cut_in_the_middle(self):
        call = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'
        for script in (f"First this.\n{call}", self.SCRIPT):
            for made in await self.spoiled("cut_tool_call", script):
                assert made.finish_reason == "length" and "<tool_call>" in made.text
                assert "}}" not in made.text and made.ids[-1] != END

    async def test_space_at_the_end_and_thinking_first(self):
        for made in await self.spoiled("trailing_space"):
            assert made.text != made.text.rstrip() and made.ids[-1] == END
        for made in await self.spoiled("thinking"):
            assert made.text.startswith("<think>\n") and made.text.endswith(f"</think>\n\n{self.SCRIPT}")

    @given(st.sets(st.sampled_from(sorted(TOKENS)), min_size=1), st.integers(0, 2**16))
    @settings(max_examples=some(25), deadline=None)
    def test_any_mixture_is_reported_truthfully(self, names, seed):
        async def check():
            policy = ToolUser(turns=1) if seed % 2 else RandomTokens(Lengths(1, 30))
            async with serving(policy, faults=dict.fromkeys(names, 0.7), seed=seed) as wire:
                prompt = CODEC.encode(CODEC.render(ASK, [TOOL]))
                _, answer = await wire.post(*vllm(prompt, n=3, max_tokens=48))
                for ids, logprobs, reason in read(vllm, answer):
                    assert logprobs == pytest.approx(wire.server.model.score(prompt, ids, Sampling(max_tokens=48)))
                    assert len(ids) <= 48 and reason in ("stop", "length", "abort")

        asyncio.run(check())

    async def test_its_frequency_is_its_probability(self):
        async with serving(faults={"trailing_space": 0.3}) as wire:
            await asyncio.gather(*(wire.post(*vllm([number, 1], max_tokens=4)) for number in range(300)))
            assert 60 < wire.server.stats["faults.trailing_space"] < 120


class TestWireFaults:
    @pytest.fixture(autouse=True)
    def short_delays(self, monkeypatch):
        monkeypatch.setattr(http_attempts_module, "_FIRST_DELAY", 0.01)

    @pytest.mark.parametrize("name", ["rate_limited", "server_error", "unavailable", "disconnect", "cut_body"])
    async def test_what_passes_is_overcome_by_a_retry(self, name):
        async with serving(Scripted("fine"), faults={name: [0, 1]}, retry_after=0.01) as wire:
            client = OpenAIServer(wire.server.settings())
            response = await client.chat(ASK)
            assert (response.message.content, response.attempts) == ("fine", 3)
            states = [(seen.faults, seen.state) for seen in wire.server.requests]
            lost = "cut" if name in ("disconnect", "cut_body") else "rejected"
            assert states == [([name], lost), ([name], lost), ([], "answered")]
            await client.close()

    async def test_429_says_when_to_come_back(self):
        async with serving(faults=["rate_limited"], retry_after=7) as wire:
            path, body = vllm(PROMPT)
            async with wire.session.post(wire.server.root_url + path, json=body) as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "7")

    async def test_a_body_cut_off_is_no_answer(self):
        async with serving(faults=["cut_body"]) as wire:
            with pytest.raises(aiohttp.ClientPayloadError):
                await wire.post(*vllm(PROMPT))

    async def test_a_hanging_request_is_counted_when_the_client_leaves(self):
        async with serving(faults=["hang"]) as wire:
            asked = asyncio.create_task(wire.post(*vllm(PROMPT)))
            await until(lambda: wire.server.stats["in_flight"] == 1)
            asked.cancel()
            await until(lambda: wire.server.stats["cancelled"] == 1)
            assert wire.server.stats["in_flight"] == 0 and wire.server.requests[0].state == "cancelled"

    @pytest.mark.parametrize(
        "name", ["wrong_echo", "no_ids", "no_logprobs", "null_logprobs", "short_logprobs", "short_ids"]
    )
    @APIS
    async def test_lies_are_told_and_remembered_as_lies(self, name, api):
        async with serving(Scripted("an answer"), faults=[name]) as wire:
            path, body = api(PROMPT)
            body["return_prompt_token_ids"] = True
            if api is atropos:
                del body["return_prompt_token_ids"]
            status, answer = await wire.post(path, body)
            assert status == 200
            (made,) = wire.server.requests[0].completions
            assert made.ids == [*CODEC.encode("an answer"), END] and len(made.logprobs) == len(made.ids)
            truth = (PROMPT, [(made.ids, made.logprobs, "stop")])
            try:
                reported = (_echo(api, answer), read(api, answer))
            except (KeyError, TypeError, AssertionError, StopIteration):
                return  # a field that is missing, or that fits to no other
            assert reported != truth

    async def test_nan_is_literal(self):
        async with serving(faults=["nan_logprobs"]) as wire:
            path, body = vllm(PROMPT)
            async with wire.session.post(wire.server.root_url + path, json=body) as response:
                raw = await response.text()
        assert "NaN" in raw and any(
            math.isnan(lp) for lp in json.loads(raw)["choices"][0]["logprobs"]["token_logprobs"]
        )

    async def test_a_web_page_is_no_answer(self):
        async with serving(faults=["not_json"]) as wire:
            with pytest.raises(orjson.JSONDecodeError):
                await wire.post(*vllm(PROMPT))

    def test_every_name_is_in_exactly_one_family(self):
        assert set(Fault) == TOKENS | WIRE and not TOKENS & WIRE
        with pytest.raises(ValueError, match=r"no fault is called nonsense; there are: thinking, "):
            FakeServer(faults=["nonsense"], tokenizer=TOKENIZER)
        with pytest.raises(ValueError, match="from 0 to 1"):
            FakeServer(faults={"hang": 2.0}, tokenizer=TOKENIZER)


class TestLoad:
    async def test_a_thousand_requests_wait_while_others_are_answered(self):
        async with serving(Scripted("fine"), latency=3600) as wire:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                many = Wire(wire.server, session)
                asked = [asyncio.create_task(many.post(*vllm([n], max_tokens=4))) for n in range(1000)]
                await until(lambda: wire.server.stats["completions"] == 1000)
                wire.server.latency = (0.0, 0.0)
                assert (await wire.post(*vllm(PROMPT)))[0] == 200
                assert wire.server.stats["in_flight"] == 1000
                for task in asked:
                    task.cancel()
            await until(lambda: wire.server.stats["cancelled"] == 1000)
            assert wire.server.stats["in_flight"] == 0

    async def test_what_is_too_much_waits_in_line(self):
        async with serving(latency=3600, max_concurrency=3) as wire:
            asked = [asyncio.create_task(wire.post(*vllm([n]))) for n in range(30)]
            await until(lambda: wire.server.stats["in_flight"] == 30)
            await until(lambda: wire.server.stats["completions"] == 3)
            assert wire.server.stats["waiting"] == 27
            for task in asked:
                task.cancel()

    async def test_a_client_that_leaves_frees_its_place(self):
        async with serving(latency=60, max_concurrency=1) as wire:
            asked = [asyncio.create_task(wire.post(*vllm([n]))) for n in range(3)]
            await until(lambda: wire.server.stats["waiting"] == 2)
            for task in asked[:2]:
                task.cancel()
            await until(lambda: wire.server.stats["cancelled"] == 2)
            await until(lambda: wire.server.stats["waiting"] == 0)
            asked[2].cancel()

    async def test_slow_start_is_503_and_then_fine(self):
        async with serving(slow_start=3600) as wire:
            assert (await wire.post(*vllm(PROMPT)))[0] == 503
            assert (await wire.get("/health"))[0] == 503
            wire.server.become_ready()
            assert (await wire.post(*vllm(PROMPT)))[0] == 200
            assert (await wire.get("/health"))[0] == 200

    async def test_refused_until_ready(self):
        async with serving(slow_start=3600, refuse_until_ready=True) as wire:
            client = OpenAIServer(wire.server.settings(max_retries=0))
            with pytest.raises(ServerUnavailable):
                await client.chat(ASK)
            wire.server.become_ready()
            await wire.server.started()
            assert (await client.chat(ASK)).message.content
            await client.close()

    async def test_slow_start_ends_by_itself(self):
        async with serving(slow_start=0.01, refuse_until_ready=True) as wire:
            await wire.server.started()
            assert (await wire.post(*vllm(PROMPT)))[0] == 200

    async def test_the_record_shows_what_was_delivered(self, tmp_path):
        path = tmp_path / "requests.jsonl"
        delivered = []
        async with serving(faults={"server_error": 0.3, "cut_body": 0.3}, record=path) as wire:
            for number in range(30):
                try:
                    status, answer = await wire.post(*vllm([number], n=2))
                except aiohttp.ClientPayloadError:
                    continue
                if status == 200:
                    delivered += [ids for ids, _, _ in read(vllm, answer)]
        lines = [orjson.loads(line) for line in path.read_bytes().splitlines()]
        assert len(lines) == 30
        assert {line["state"] for line in lines} == {"answered", "rejected", "cut"}
        assert delivered == [
            made["ids"] for line in lines if line["state"] == "answered" for made in line["completions"]
        ]


class TestCommand:
    async def test_it_prints_its_address_serves_and_ends_on_a_signal(self, tmp_path):
        folder = tmp_path / "tokenizer"
        options = [
            "--save-tokenizer",
            str(folder),
            "--port",
            "0",
            "--policy",
            "tokens",
            "--lengths",
            "5",
            "--faults",
            "rate_limited=0",
            "--api-key",
            "k",
        ]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lachesis", "fake-server", *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            url = (await process.stdout.readline()).decode().strip()
            client = OpenAIServer(ServerSettings(url, "fake", api_key="k"))
            response = await client.chat(ASK, max_tokens=50)
            assert 1 <= response.usage.completion_tokens <= 5
            await client.close()
        finally:
            while process.returncode is None:  # `timeout` sends two
                with contextlib.suppress(ProcessLookupError):
                    # process.send_signal() would poll, and so take the exit status from the event loop
                    os.kill(process.pid, signal.SIGTERM)
                await asyncio.sleep(0.002)
        _, said = await asyncio.wait_for(process.communicate(), 60)
        saved = AutoTokenizer.from_pretrained(str(folder))
        assert saved.encode("Hello <|im_end|> <tool_call>") == CODEC.encode("Hello <|im_end|> <tool_call>")
        assert (saved.chat_template, saved.eos_token_id) == (TOKENIZER.chat_template, END)
        assert process.returncode == 0 and b"1 request, 1 completion" in said
        assert b"PyTorch" not in said

    @pytest.mark.parametrize(
        "options",
        [["--faults", "nonsense=1"], ["--lengths", "0"], ["--latency", "3-1"], ["--policy", "script"], ["--by-turn"]],
    )
    def test_mistakes_are_named(self, options, capsys):
        from lachesis_testing.verbs.fake_server import main

        try:
            code = main(options)
        except SystemExit as stop:
            code = stop.code
        assert code == 2
        said = capsys.readouterr().err
        assert any(word in said for word in ("nonsense", "'0'", "'3-1'", "texts to say", "--by-turn"))

    async def test_a_script_is_heard_by_request_or_by_turn(self):
        from lachesis_testing.verbs.fake_server import _parser, _server

        async def heard(*options):
            said = ("--port", "0", "--policy", "script", "--say", "one", "--say", "two")
            server = _server(_parser().parse_args([*said, *options]))
            async with server, OpenAIServer(server.settings()) as client:
                return [(await client.chat(ASK)).message.content for _ in range(3)]

        assert await heard() == ["one", "two", "two"]
        assert await heard("--by-turn") == ["one", "one", "one"]


def _call(arguments):
    written = arguments if isinstance(arguments, dict) else json.dumps({"command": arguments})
    return {"id": "call_1", "type": "function", "function": {"name": "terminal", "arguments": written}}


def _echo(api, body):
    if api is vllm:
        return body["choices"][0]["prompt_token_ids"]
    return body["prompt_token_ids"]


async def until(condition):
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the server's counters have no event to wait for
            await asyncio.sleep(0.005)
