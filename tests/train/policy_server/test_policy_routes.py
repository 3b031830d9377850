"""What the routes of the policy server answer, and what they refuse."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest
from serving import serving

from backends.errors import SettingsError
from lachesis_client.errors import ContextExhausted
from lachesis_client.sampling import Sampling
from lachesis_testing.engine_bench import until
from lachesis_testing.fake_server import Reply, Scripted, fake_tokenizer, letter_swapped
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.tokenizer_proof import TokenizerProof, TokenizersDiffer
from lachesis_tokens.wire.writing import dump
from lachesis_train.policy import Sampled
from lachesis_train.policy_server import routes
from tests.support.sampler import FakeSampler

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Today's weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
ASK = {"role": "user", "content": "How is the weather in Köln?"}
VERSIONED = "weight_versions"
WARM = {"temperature": 0.5}


def template_ids(tokenizer, messages, tools=None):
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)


async def test_a_chat_with_tools_goes_through_the_models_template_and_back():
    async with serving(CALL) as it:
        asked = {"model": "policy", "messages": [ASK], "tools": [WEATHER], "return_token_ids": True, "logprobs": True}
        answer = (await it.ask("/v1/chat/completions", asked)).body
        [choice] = answer["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
        tokenizer = it.sampler.codec.tokenizer
        assert (
            answer["prompt_token_ids"] == template_ids(tokenizer, [ASK], [WEATHER]) == it.sampler.calls[0]["prompt_ids"]
        )
        assert tokenizer.decode(choice["token_ids"]) == CALL + "<|im_end|>"
        assert [each["logprob"] for each in choice["logprobs"]["content"]] == pytest.approx(
            it.sampler.model.score(answer["prompt_token_ids"], choice["token_ids"], Sampling(1))
        )
        assert answer["usage"] == {
            "prompt_tokens": len(answer["prompt_token_ids"]),
            "completion_tokens": len(choice["token_ids"]),
            "total_tokens": len(answer["prompt_token_ids"]) + len(choice["token_ids"]),
        }
        assert choice[VERSIONED] == [{"version": "run:0", "start": 0, "end": len(choice["token_ids"])}]
        assert answer["system_fingerprint"] == "run:0"

        result = {"role": "tool", "tool_call_id": call["id"], "content": "12 degrees, rain"}
        turns = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        await it.ask("/v1/chat/completions", {"messages": turns, "tools": [WEATHER]})
        prompt = it.sampler.codec.decode(it.sampler.calls[1]["prompt_ids"])
        assert '"name": "weather"' in prompt and "12 degrees, rain" in prompt and "Köln" in prompt


@pytest.mark.parametrize(
    ("choice", "reason", "calls"), [("none", "stop", 0), ("auto", "tool_calls", 1), ("required", "tool_calls", 1)]
)
async def test_tool_choice(choice, reason, calls):
    rest = 'weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    async with serving(rest if choice == "required" else CALL) as it:
        asked = {"messages": [ASK], "tools": [WEATHER], "tool_choice": choice}
        [one] = (await it.ask("/v1/chat/completions", asked)).body["choices"]
        assert one["finish_reason"] == reason
        assert len(one["message"].get("tool_calls") or ()) == calls


async def test_a_completion_that_is_cut_says_length():
    async with serving("One two three four five six seven.") as it:
        for path, body in (
            ("/v1/completions", {"prompt": "Count"}),
            ("/v1/chat/completions", {"messages": [ASK]}),
        ):
            answer = (await it.ask(path, {**body, "max_tokens": 2})).body
            assert answer["choices"][0]["finish_reason"] == "length"
            assert answer["usage"]["completion_tokens"] == 2
        answer = (await it.ask("/generate", {"text": "Count", "sampling_params": {"max_new_tokens": 2}})).body
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}


async def test_prompts_of_text_and_of_ids_alone_and_in_lists():
    async with serving() as it:
        ids = it.sampler.codec.encode("When is the tide high?")
        for prompt, count in (
            ("When is the tide high?", 1),
            (ids, 1),
            ([ids, ids], 2),
            (["When is the tide high?"], 1),
        ):
            asked = {"prompt": prompt, "n": 2, "max_tokens": 4, "seed": 1, "logprobs": 0, "return_token_ids": True}
            choices = (await it.ask("/v1/completions", asked)).body["choices"]
            assert [choice["index"] for choice in choices] == list(range(2 * count))
            for choice in choices:
                assert choice["prompt_token_ids"] == ids
                scores = it.sampler.model.score(ids, choice["token_ids"], Sampling(1))
                assert choice["logprobs"]["token_logprobs"] == pytest.approx(scores)
            assert choices[0]["token_ids"] != choices[1]["token_ids"]


async def test_what_a_text_shows_of_stops_and_special_tokens():
    async with serving("Fish <|im_start|>and chips. No peas.") as it:
        asked = {"prompt": "Menu", "max_tokens": 40, "return_token_ids": True}
        text = {}
        for name, more in {
            "plain": {},
            "special": {"skip_special_tokens": False},
            "stop": {"stop": ["chips"]},
            "kept": {"stop": "chips", "include_stop_str_in_output": True},
        }.items():
            [choice] = (await it.ask("/v1/completions", {**asked, **more})).body["choices"]
            text[name] = choice["text"]
            assert choice["finish_reason"] == "stop"
        assert text["plain"].split() == ["Fish", "and", "chips.", "No", "peas."]
        assert text["special"] == "Fish <|im_start|>and chips. No peas."
        assert text["stop"].endswith("and ") and text["kept"].endswith("and chips")


async def test_stop_token_ids_and_ignore_eos_are_followed():
    async with serving() as it:
        [chips] = it.sampler.codec.encode("c")
        end = min(it.sampler.model.end_ids)
        it.sampler.policy = Scripted(Reply([end, chips, end, end, end]))
        for more, ids, reason in (
            ({}, [end], "stop"),
            ({"ignore_eos": True}, [end, chips, end, end], "length"),
            ({"ignore_eos": True, "stop_token_ids": [chips]}, [end, chips], "stop"),
        ):
            asked = {"prompt": [5], "max_tokens": 4, "return_token_ids": True, **more}
            [choice] = (await it.ask("/v1/completions", asked)).body["choices"]
            assert (choice["token_ids"], choice["finish_reason"]) == (ids, reason)


async def test_tokens_are_named_by_their_ids_on_request():
    async with serving() as it:
        asked = {"prompt": [5], "logprobs": 0, "return_tokens_as_token_ids": True, "return_token_ids": True}
        [choice] = (await it.ask("/v1/completions", asked)).body["choices"]
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]


async def test_several_prompts_and_completions_of_sglangs_route_are_a_list():
    async with serving() as it:
        answers = (await it.ask("/generate", {"input_ids": [[5], [6, 7]]})).body
        assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [1, 2]
        asked = {"input_ids": [5, 6], "sampling_params": {"n": 3, "max_new_tokens": 4}, "return_logprob": True}
        answers = (await it.ask("/generate", asked)).body
        assert len(answers) == 3
        for answer in answers:
            meta = answer["meta_info"]
            assert meta["weight_version"] == "run:0"
            assert meta["weight_versions"] == [{"version": "run:0", "start": 0, "end": meta["completion_tokens"]}]
            listed = [entry[1] for entry in meta["output_token_logprobs"]]
            assert listed == answer["output_ids"] and len(listed) == meta["completion_tokens"]


IDS = "/inference/v1/generate"


def of_ids(**parameters):
    return {"model": "policy", "token_ids": [5, 6], "sampling_params": {"max_tokens": 4, **parameters}}


async def test_ids_in_and_ids_out_with_logprobs_and_the_version_of_each_completion():
    async with serving() as it:
        asked = of_ids(n=3, logprobs=1, seed=1, routed_experts_prompt_start=1, skip_special_tokens=False)
        whole = {**asked, "return_token_ids": True, "cache_salt": "7", "priority": 2, "request_id": "mine"}
        answer = (await it.ask(IDS, whole)).body
        assert (answer["request_id"], answer["prompt_token_ids"]) == ("mine", [5, 6])
        assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
        for choice in answer["choices"]:
            ids, content = choice["token_ids"], choice["logprobs"]["content"]
            scores = it.sampler.model.score([5, 6], ids, Sampling(1))
            assert [entry["logprob"] for entry in content] == pytest.approx(scores)
            assert [(entry["token_id"], entry["token"]) for entry in content] == [(i, f"token_id:{i}") for i in ids]
            assert choice[VERSIONED] == [{"version": "run:0", "start": 0, "end": len(ids)}]
            assert choice["finish_reason"] in ("stop", "length")
        again = (await it.ask(IDS, asked)).body["choices"]
        assert [choice["token_ids"] for choice in again] == [choice["token_ids"] for choice in answer["choices"]]
        bare = (await it.ask(IDS, {"token_ids": [5]})).body
        assert (bare["choices"][0]["logprobs"], bare["prompt_token_ids"]) == (None, None)


async def test_stop_ids_and_the_context_end_a_completion_of_ids():
    async with serving(context_length=8) as it:
        [chips] = it.sampler.codec.encode("c")
        end = min(it.sampler.model.end_ids)
        it.sampler.policy = Scripted(Reply([end, chips, *[end] * 6]))
        for more, ids, reason in (
            ({}, [end], "stop"),
            ({"ignore_eos": True, "stop_token_ids": [chips]}, [end, chips], "stop"),
            ({"ignore_eos": True, "max_tokens": 99}, [end, chips, end, end, end, end], "length"),
        ):
            [choice] = (await it.ask(IDS, of_ids(**more))).body["choices"]
            assert (choice["token_ids"], choice["finish_reason"]) == (ids, reason)
        too_long = await it.ask(IDS, {"token_ids": [5] * 8, "sampling_params": {}})
        assert too_long.status == 400 and too_long.body["error"]["code"] == "context_length_exceeded"
        assert "maximum model length of 8" in too_long.error


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        (IDS, {"sampling_params": {}}, "token_ids"),
        (IDS, {"token_ids": [1 << 40]}, "Token id"),
        (IDS, {"token_ids": [5], "sampling_params": 3}, "sampling_params"),
        (IDS, of_ids(logprobs=5), "logprobs"),
        (IDS, of_ids(min_tokens=2), "sampling_params.min_tokens"),
        (IDS, of_ids(n=1000), "n is 1000"),
        (IDS, of_ids(n=2, temperature=0), "n must be 1"),
        (IDS, of_ids(routed_experts_prompt_start=9), "routed_experts_prompt_start"),
        (IDS, {**of_ids(), "stream": True}, "stream"),
        (IDS, {**of_ids(), "features": {"mm_hashes": {}}}, "features"),
        (IDS, {**of_ids(), "content_parts": [{"type": "image_url", "url": "data:"}]}, "content_parts"),
        ("/v1/completions", {"prompt": [5], "min_p": 0.1}, "min_p"),
        ("/v1/completions", {"prompt": [5], "repetition_penalty": 1.1}, "repetition_penalty"),
        ("/v1/completions", {"prompt": [5], "logit_bias": {"5": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": [5], "min_tokens": 2}, "min_tokens"),
        ("/v1/completions", {"prompt": [5], "beam_search_of_tomorrow": 1}, "beam_search_of_tomorrow"),
        ("/v1/completions", {"prompt": [5], "stream": True}, "stream"),
        ("/v1/completions", {"prompt": [5], "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [5], "logprobs": 5}, "logprobs"),
        ("/v1/completions", {"prompt": [5], "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": [5], "lora_path": "other"}, "lora_path"),
        ("/v1/completions", {"prompt": [5], "temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": [5], "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": [5], "n": 1000}, "n is 1000"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1 << 40]}, "Token id"),
        ("/v1/chat/completions", {"messages": [ASK], "top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": [ASK], "response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"messages": [ASK], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ("/v1/chat/completions", {"messages": [ASK], "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}, "nobody"),
        ("/v1/chat/completions", {"messages": [ASK], "tool_choice": "required"}, "tool_choice"),
        ("/generate", {"input_ids": [5], "sampling_params": {"min_p": 0.2}}, "sampling_params.min_p"),
        ("/generate", {"input_ids": [5], "logprob_start_len": 0}, "logprob_start_len"),
        (
            "/generate",
            {"input_ids": [5], "sampling_params": {"temperature": 0.5}, "return_logprob": True},
            "temperature",
        ),
        ("/generate", {"prompt": {"prompt_token_ids": [5]}, "prompt_logprobs": 1}, "prompt_logprobs"),
        ("/generate", {"prompt": {"prompt_token_ids": [[5], [6]]}}, "one prompt"),
        ("/generate", {"prompt": {}}, "prompt"),
        ("/tokenize", {}, "prompt or messages"),
    ],
)
async def test_what_the_policy_cannot_do_is_refused_by_name(path, body, named):
    async with serving() as it:
        answer = await it.ask(path, body)
        assert answer.status == 400 and named in answer.error
        assert not it.sampler.calls


async def test_fields_that_change_nothing_are_ignored():
    async with serving("Hello.") as it:
        plain = {"prompt": [5], "seed": 3}
        fields = {
            "user": "me",
            "priority": 3,
            "cache_salt": "x",
            "min_p": 0.0,
            "presence_penalty": 0,
            "top_k": -1,
            "watermarking": False,
            "logit_bias": {},
            "echo": False,
            "best_of": None,
            "metadata": {"a": "b"},
        }
        texts = [(await it.ask("/v1/completions", body)).body["choices"][0]["text"] for body in (plain, plain | fields)]
        assert texts == ["Hello."] * 2
        chat = {"messages": [ASK], "parallel_tool_calls": True, "response_format": {"type": "text"}, "store": True}
        assert (await it.ask("/v1/chat/completions", chat)).status == 200


async def test_greedy_completions_have_logprobs_on_sglangs_route():
    async with serving() as it:
        asked = {"input_ids": [5], "sampling_params": {"temperature": 0}, "return_logprob": True}
        assert (await it.ask("/generate", asked)).status == 200


async def test_another_model_is_an_error_that_names_this_one():
    async with serving() as it:
        for path, name in (("/v1/completions", "prompt"), ("/generate", "input_ids"), (IDS, "token_ids")):
            answer = await it.ask(path, {"model": "other", name: [5]})
            assert answer.status == 404 and "'other'" in answer.error and "'policy'" in answer.error


class Broken(FakeSampler):
    """Answers with `result`: an error, or completions."""

    result = None

    async def sample(self, prompt_ids, **asked):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize(
    ("result", "status", "named"),
    [
        (RuntimeError("out of memory"), 503, "RuntimeError: out of memory"),
        (ConnectionError("the engine is gone"), 503, "the engine is gone"),
        (ValueError("max_tokens is more than the engine's 64"), 400, "max_tokens is more"),
        ([], 503, "1 completions were requested"),
        ([Sampled([5, 6], [-1.0], "stop")], 503, "2 tokens with 1 logprobs"),
        ([Sampled([5], [math.nan], "stop")], 503, "not finite numbers"),
        ([Sampled([5], [None], "stop")], 503, "an invalid completion"),
        (None, 503, "an invalid completion"),
        ([Sampled([-5], [-1.0], "stop")], 503, "not token ids"),
        ([Sampled([2**40], [-1.0], "stop")], 503, "not token ids"),
        (asyncio.CancelledError(), 503, "the engine cancelled the request"),
        ([Sampled([], [], "stop")], 503, "0 tokens"),
        ([Sampled([5] * 9, [-1.0] * 9, "length")], 503, "at most 4 tokens"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/generate", IDS])
async def test_a_failure_of_the_engine_is_the_servers_and_has_its_reason(result, status, named, path):
    sampler = Broken()
    sampler.result = result
    async with serving(sampler=sampler, retry_after=3) as it:
        bodies = {"/generate": {"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}, IDS: of_ids()}
        answer = await it.ask(path, bodies.get(path, {"prompt": [5], "max_tokens": 4}))
        assert answer.status == status and named in answer.error
        assert answer.headers.get("Retry-After") == ("3" if status == 503 else None)


async def test_an_infinite_temperature_and_a_lone_surrogate_are_bad_requests():
    async with serving() as it:
        for raw in (b'{"prompt": "a", "temperature": 1e400}', b'{"prompt": "\\ud800"}'):
            async with it.session.post(f"{it.server.root_url}/v1/completions", data=raw) as response:
                assert response.status == 400


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
async def test_long_answers_are_written_in_a_thread(monkeypatch, path):
    writers = []

    def dumped(value):
        writers.append(threading.current_thread())
        return dump(value)

    monkeypatch.setattr(routes, "dump", dumped)
    sampler = Broken()
    sampler.result = [Sampled([5] * 9000, [-1.0] * 9000, "length")]
    async with serving(sampler=sampler, context_length=20_000) as it:
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 9000}, "return_logprob": True}
        asked = body if path == "/generate" else {"prompt": [5], "max_tokens": 9000, "logprobs": 1}
        assert (await it.ask(path, asked)).status == 200
    assert len(writers) == 1 and writers[0] is not threading.current_thread()


async def test_a_body_that_is_no_object_is_a_bad_request():
    async with serving() as it:
        for raw in (b"{", b"[1]", b"[" * 100_000):
            async with it.session.post(f"{it.server.root_url}/v1/completions", data=raw) as response:
                assert response.status == 400


async def test_more_requests_than_may_wait_are_sent_away_and_a_client_that_leaves_frees_its_place():
    async with serving(sampler=FakeSampler(latency=3600), max_concurrency=1, max_waiting=1, retry_after=7) as it:
        asked = {"prompt": [5], "max_tokens": 1}
        first = asyncio.create_task(it.ask("/v1/completions", asked))
        await until(lambda: _is(it.sampler.busy == 1))
        second = asyncio.create_task(it.ask("/v1/completions", asked))
        await until(lambda: _is(it.server.in_flight == 2))
        third = await it.ask("/v1/completions", asked)
        assert third.status == 429 and third.headers["Retry-After"] == "7" and "2 requests" in third.error
        assert it.sampler.busy == 1
        first.cancel()
        await until(lambda: _is(it.sampler.cancelled == 1 and it.sampler.busy == 1))  # the second has its place
        assert it.server.in_flight == 1
        second.cancel()
        await until(lambda: _is(it.server.in_flight == 0))


async def _is(value):
    return value


async def test_the_token_is_required_where_one_is_set():
    async with serving(token="sesame") as it:
        paths = {
            "/v1/models": None,
            "/wandb_info": None,
            "/v1/completions": {"prompt": [5]},
            "/tokenize": {"prompt": "x"},
        }
        for path, body in paths.items():
            for headers in ({}, {"Authorization": "Bearer other"}):
                answer = await it.ask(path, body, headers=headers)
                assert answer.status == 401 and "sesame" not in answer.error
            assert (await it.ask(path, body, headers={"Authorization": "Bearer sesame"})).status == 200
        assert (await it.ask("/health")).status == 200


@pytest.mark.parametrize(
    ("host", "token", "warned"), [("0.0.0.0", None, 1), ("0.0.0.0", "x", 0), ("127.0.0.1", None, 0)]
)
async def test_a_server_that_anybody_can_reach_warns(host, token, warned, caplog):
    async with serving(host=host, token=token):
        assert len([record for record in caplog.records if "without a token" in record.message]) == warned


async def test_facts_about_the_server():
    async with serving(wandb_info={"group": "g", "project": "p"}, context_length=64) as it:
        assert it.server.address[0] == "127.0.0.1"
        assert (await it.ask("/wandb_info")).body == {"group": "g", "project": "p"}
        health = (await it.ask("/health")).body
        assert (health["status"], health["version"], health["step"]) == ("ok", "run:0", 0)
        [card] = (await it.ask("/v1/models")).body["data"]
        assert (card["id"], card["max_model_len"]) == ("policy", 64)
        assert (await it.ask("/get_model_info")).body["weight_version"] == "run:0"
        ids = (await it.ask("/tokenize", {"messages": [ASK], "tools": [WEATHER]})).body["tokens"]
        assert ids == template_ids(it.sampler.codec.tokenizer, [ASK], [WEATHER])


async def test_max_tokens_is_lowered_to_the_room_that_the_prompt_leaves():
    async with serving(context_length=10) as it:
        asked = {"prompt": [5] * 8, "max_tokens": 100, "ignore_eos": True}
        answer = (await it.ask("/v1/completions", asked)).body
        assert answer["usage"]["completion_tokens"] == 2 and answer["choices"][0]["finish_reason"] == "length"
        too_long = await it.ask("/v1/completions", {"prompt": [5] * 10})
        assert too_long.status == 400 and too_long.body["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang", "atropos"])
async def test_a_prompt_that_the_engine_finds_too_long_is_no_setting_to_correct(kind):
    """Where only the engine knows the context."""
    sampler = Broken()
    sampler.result = ValueError("5000 tokens of prompt and max_tokens 1 exceed the context of the model, 4096")
    async with serving(sampler=sampler) as it:
        engine = create_engine(kind, it.settings())
        with pytest.raises(ContextExhausted, match="4096"):
            await engine.generate([5], Sampling(1))
        await engine.close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_the_runs_tokenizer_is_compared_with_the_servers(kind):
    async with serving() as it:
        engine = create_engine(kind, it.settings())
        assert await TokenizerProof(it.sampler.codec.tokenizer).prove(engine)
        with pytest.raises(TokenizersDiffer):
            await TokenizerProof(letter_swapped(fake_tokenizer())).prove(engine)
        await engine.close()


async def test_a_port_that_is_taken_is_an_error_that_names_it():
    async with serving() as it:
        with pytest.raises(SettingsError, match=str(it.server.address[1])):
            async with serving(port=it.server.address[1]):
                pass
