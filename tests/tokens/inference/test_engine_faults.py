"""What servers get wrong, and what the engines make of it: another try, or an error that says what; never a token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from engine_bench import FAKED, bench

from lachesis_client import BadResponse, ContextExhausted, RequestRejected, ServerUnavailable
from lachesis_client.client_settings import ServerSettings
from lachesis_client.sampling import Sampling
from lachesis_messages.messages import FinishReason
from lachesis_testing.fake_server import Fault, fake_tokenizer
from lachesis_testing.fake_server.faults import TOKENS
from lachesis_tokens.engines import create_engine
from lachesis_tokens.prompts.prompts import PromptBuilder
from lachesis_tokens.server.token_server import TokenServer

PROMPT = [5, 6, 7]
PASSES = ("rate_limited", "server_error", "unavailable", "disconnect", "cut_body")
LIES = (
    "no_ids",
    "no_logprobs",
    "nan_logprobs",
    "null_logprobs",
    "short_logprobs",
    "short_ids",
    "wrong_echo",
    "not_json",
)


@pytest.mark.sample(26)
@pytest.mark.parametrize("kind", FAKED)
@pytest.mark.parametrize("fault", sorted(TOKENS))
async def test_what_was_sampled_arrives_as_it_was(kind, fault):
    async with bench(kind, None, "Well, <b>42</b> é.", faults=[fault]) as it:
        result = await it.engine.generate(PROMPT, Sampling(max_tokens=200), n=2)
        sampled = it.server.requests[-1].completions
        assert [list(one.ids) for one in result] == [made.ids for made in sampled]
        assert [list(one.logprobs) for one in result] == [pytest.approx(made.logprobs) for made in sampled]
        assert [one.raw_finish_reason for one in result] == [made.finish_reason for made in sampled]


@pytest.mark.parametrize("fault", PASSES)
async def test_what_may_pass_is_asked_again(fault):
    async def one(kind: str) -> None:
        async with bench(kind, None, faults={fault: [0]}, retry_after=0.0) as it:
            result = await it.engine.generate(PROMPT, Sampling(max_tokens=4))
            assert result[0].attempts == 2
            assert list(result[0].ids) == it.server.requests[-1].completions[0].ids

    await asyncio.gather(*map(one, FAKED))


@pytest.mark.parametrize("fault", PASSES)
async def test_what_does_not_pass_ends_unavailable(fault):
    async def one(kind: str) -> None:
        async with bench(kind, None, faults=[fault], retry_after=0.0, settings={"max_retries": 1}) as it:
            with pytest.raises(ServerUnavailable, match="after 2 attempts"):
                await it.engine.generate(PROMPT, Sampling(max_tokens=4))
            assert it.server.stats["requests"] == 2

    await asyncio.gather(*map(one, FAKED))


@pytest.mark.parametrize("kind", FAKED)
async def test_a_server_that_hangs_is_left(kind):
    async with bench(kind, None, faults=["hang"], settings={"timeout": 0.1, "max_retries": 0}) as it:
        with pytest.raises(ServerUnavailable, match=r"no answer within 0\.1 s"):
            await it.engine.generate(PROMPT, Sampling(max_tokens=4))


@pytest.mark.parametrize("kind", FAKED)
async def test_the_retries_of_a_call_are_its_own(kind):
    async with bench(kind, None, faults=["server_error"], settings={"max_retries": 9}) as it:
        with pytest.raises(ServerUnavailable, match="1 attempt"):
            await it.engine.generate(PROMPT, Sampling(max_tokens=4), max_retries=0)


@pytest.mark.parametrize("kind", FAKED)
@pytest.mark.parametrize("fault", LIES)
async def test_an_answer_that_cannot_be_trusted_is_rejected_at_once(kind, fault):
    async with bench(kind, None, faults=[fault]) as it:
        with pytest.raises(BadResponse):
            await it.engine.generate(PROMPT, Sampling(max_tokens=8), n=2)
        assert it.server.stats["requests"] == 1


async def test_a_server_without_the_model_says_so():
    for kind in ("vllm", "vllm-generate"):
        async with bench(kind, None, settings={"model_name": "other"}) as it:
            with pytest.raises(RequestRejected, match="check model_name"):
                await it.engine.generate(PROMPT, Sampling(max_tokens=4))


# Answers as these servers give them, for one completion of two tokens.

VLLM = {
    "model": "m",
    "choices": [
        {
            "index": 0,
            "token_ids": [9, 2],
            "logprobs": {"token_logprobs": [-0.5, -0.25]},
            "finish_reason": "stop",
            "prompt_token_ids": PROMPT,
        }
    ],
    "usage": {"prompt_tokens": 3},
}
VLLM_GENERATE = {
    "choices": [
        {
            "index": 0,
            "token_ids": [9, 2],
            "logprobs": {"content": [{"token_id": 9, "logprob": -0.5}, {"token_id": 2, "logprob": -0.25}]},
            "finish_reason": "stop",
        }
    ],
    "prompt_token_ids": PROMPT,
}
SGLANG = {
    "text": "x",
    "output_ids": [9, 2],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 2},
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "weight_version": "default",
        "output_token_logprobs": [[-0.5, 9, None], [-0.25, 2, None]],
    },
}
ATROPOS = {
    "text": ["x"],
    "finish_reasons": ["stop"],
    "logprobs": [[[{"9": -0.5}], [{"2": -0.25}]]],
    "prompt_token_ids": PROMPT,
    "token_ids": [[9, 2]],
}
LLAMA = {
    "model": "m",
    "tokens": [9, 2],
    "tokens_evaluated": 3,
    "stop_type": "eos",
    "truncated": False,
    "completion_probabilities": [{"id": 9, "logprob": -0.5}, {"id": 2, "logprob": -0.25}],
}
GOOD = {"vllm": VLLM, "vllm-generate": VLLM_GENERATE, "sglang": SGLANG, "atropos": ATROPOS, "llama.cpp": LLAMA}


def changed(body: Any, path: str, value: Any) -> Any:
    """A copy of `body` with another value at `path` (keys and indices, joined by dots)."""
    key, _, rest = path.partition(".")
    if isinstance(body, list):
        return [changed(item, rest, value) if rest and i == int(key) else item if i != int(key) else value
                for i, item in enumerate(body)]  # fmt: skip
    return {**body, key: changed(body[key], rest, value) if rest else value}


@asynccontextmanager
async def answering(kind: str, *answers: Any, **settings: Any):
    """The engine, at a server that answers with these bodies (or statuses and bodies), the last one for ever."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        said = answers[min(len(asked), len(answers)) - 1]
        status, body = said if isinstance(said, tuple) else (200, said)
        return web.json_response(body, status=status)

    async def props(_: web.Request) -> web.Response:
        return web.json_response({"default_generation_settings": {"n_ctx": 4}})

    app = web.Application()
    app.router.add_post("/{tail:.*}", answer)
    app.router.add_get("/props", props)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    engine = create_engine(kind, ServerSettings(**{"base_url": url, "model_name": "m", "timeout": 60.0} | settings))
    try:
        yield engine, asked
    finally:
        await engine.close()
        await runner.cleanup()


@pytest.mark.parametrize("kind", GOOD)
async def test_a_good_answer_is_read(kind):
    async with answering(kind, GOOD[kind]) as (engine, _):
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert (list(one.ids), list(one.logprobs)) == ([9, 2], [-0.5, -0.25])
        assert one.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("kind", "path", "value", "named"),
    [
        ("vllm", "choices.0.token_ids", None, r"0\.10\.2"),
        ("vllm", "choices.0.token_ids", [9], "1 token ids, but 2 logprobs"),
        ("vllm", "choices.0.token_ids", [9, -1], "-1 is not a token id"),
        ("vllm", "choices.0.token_ids", [9, 2.0], r"2\.0 is not a token id"),
        ("vllm", "choices.0.token_ids", [9, True], "True is not a token id"),
        ("vllm", "choices.0.token_ids", [9, 1 << 32], "is not a token id"),
        ("vllm", "choices.0.logprobs", None, "no logprobs"),
        ("vllm", "choices.0.logprobs.token_logprobs", [-0.5, 0.1], r"token 1 is 0\.1"),
        ("vllm", "choices.0.logprobs.token_logprobs", [-0.5, -9999.0], r"token 1 is -9999\.0"),
        ("vllm", "choices.0.logprobs.token_logprobs", [-0.5, "-1"], "token 1 is '-1'"),
        ("vllm", "choices.0.prompt_token_ids", [5, 6, 8], "id 2 was sent as 7 and came back as 8"),
        ("vllm", "choices.0.prompt_token_ids", [1, 5, 6, 7], "had 3 tokens, but the server sampled after 4"),
        ("vllm", "choices.0.prompt_token_ids", "5 6 7", "came back as str"),
        ("vllm", "choices", [], "no choices"),
        ("vllm", "choices", None, "no choices"),
        ("vllm", "choices", 5, "no choices"),
        ("vllm-generate", "choices.0.logprobs.content.1.token_id", 3, "is 2, but its logprob belongs to 3"),
        ("vllm-generate", "choices.0.logprobs", None, "enable-scale-out"),
        ("vllm-generate", "prompt_token_ids", [5, 6], "had 3 tokens, but the server sampled after 2"),
        ("sglang", "meta_info.prompt_tokens", 2, "allow-auto-truncate"),
        ("sglang", "meta_info.completion_tokens", 3, "counts 3 completion tokens, but lists 2"),
        ("sglang", "meta_info.output_token_logprobs", None, "output_token_logprobs"),
        ("sglang", "meta_info", None, "no meta_info"),
        ("sglang", "output_ids", [9], "output_ids and the ids in output_token_logprobs differ"),
        ("atropos", "logprobs", [[[{"9": -0.5, "8": -1.0}], [{"2": -0.25}]]], "not as one id with one logprob"),
        ("atropos", "token_ids", [[9, 3]], "token_ids and the ids in logprobs differ"),
        ("atropos", "logprobs", None, "stock vLLM: engine vllm"),
        ("atropos", "logprobs", [None], "came as None"),
        ("llama.cpp", "tokens", None, "return_tokens"),
        ("llama.cpp", "tokens_evaluated", 4, "had 3 tokens, but the server sampled after 4"),
        ("llama.cpp", "truncated", True, "--context-shift"),
    ],
)
async def test_a_bad_answer_is_named(kind, path, value, named):
    async with answering(kind, changed(GOOD[kind], path, value)) as (engine, asked):
        with pytest.raises(BadResponse, match=named):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert len(asked) == (1 if value or path != "choices" else 3), "an answer without choices may pass"


@pytest.mark.parametrize("kind", ["vllm", "vllm-generate", "sglang"])
async def test_the_length_of_a_prompt_that_is_not_repeated_is_compared(kind):
    good = GOOD[kind]
    if kind == "sglang":
        good = changed(good, "meta_info.prompt_tokens", 2)
    else:
        good = {**good, "prompt_token_ids": None, "usage": {"prompt_tokens": 2}}
    if kind == "vllm":
        logprobs = {"token_logprobs": [-0.5, -0.25], "tokens": ["token_id:9", "token_id:2"]}
        choice = {**good["choices"][0], "prompt_token_ids": None, "token_ids": None, "logprobs": logprobs}
        good["choices"] = [choice]
    async with answering(kind, good, echo_limit=2) as (engine, asked):
        with pytest.raises(BadResponse, match="had 3 tokens, but the server sampled after 2"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert [list(one.ids) for one in await engine.generate(PROMPT[:2], Sampling(max_tokens=4))] == [[9, 2]]
        repeats = "return_prompt_token_ids" if kind == "sglang" else "return_token_ids"
        assert [body[repeats] for body in asked] == [False, True]


@pytest.mark.parametrize(
    ("kind", "path", "value", "read"),
    [
        ("vllm", "choices.0.logprobs.token_logprobs", [0, -0.25], [0.0, -0.25]),
        ("vllm", "choices.0.logprobs.token_logprobs", [1.2e-7, -0.25], [0.0, -0.25]),
        ("vllm-generate", "choices.0.logprobs.content.0", {"token": "token_id:9", "logprob": -0.5}, [-0.5, -0.25]),
        ("sglang", "meta_info.finish_reason", "stop", [-0.5, -0.25]),
        ("sglang", "output_ids", [6, 7, 9, 2], [-0.5, -0.25]),
        ("atropos", "logprobs", [[{"9": -0.5}, {"2": -0.25}]], [-0.5, -0.25]),
        ("atropos", "token_ids", None, [-0.5, -0.25]),
    ],
)
async def test_what_versions_write_otherwise_is_read_as_well(kind, path, value, read):
    async with answering(kind, changed(GOOD[kind], path, value)) as (engine, _):
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert (list(one.ids), list(one.logprobs), one.finish_reason) == ([9, 2], read, FinishReason.STOP)


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("vllm", "choices.0.finish_reason", "abort"),
        ("vllm-generate", "choices.0.finish_reason", "abort"),
        ("sglang", "meta_info.finish_reason", {"type": "abort", "message": "weights are updated"}),
        ("sglang", "meta_info", {"finish_reason": {"type": "abort"}, "weight_version": "7"}),
        ("atropos", "finish_reasons", ["abort"]),
    ],
)
async def test_a_completion_that_the_server_aborted_comes_with_its_tokens(kind, path, value):
    body = changed(GOOD[kind], path, value)
    in_queue = path == "meta_info"
    async with answering(kind, changed(body, "output_ids", []) if in_queue else body) as (engine, asked):
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert (one.finish_reason, len(asked)) == (FinishReason.ABORT, 1)
        assert list(one.ids) == ([] if in_queue else [9, 2])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("vllm", "choices", []),
        ("vllm", "choices", None),
        ("vllm", "choices.0.finish_reason", "worker_lost"),
        ("vllm-generate", "choices.0.finish_reason", "error"),
        ("sglang", "meta_info.finish_reason", {"type": "error", "message": "NaN"}),
        ("atropos", "finish_reasons", ["error"]),
    ],
)
async def test_a_completion_that_the_server_gave_up_is_asked_again(kind, path, value):
    async with answering(kind, changed(GOOD[kind], path, value), GOOD[kind]) as (engine, asked):
        result = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert (result[0].attempts, len(asked)) == (2, 2)
        assert list(result[0].ids) == [9, 2]


async def test_a_completion_that_was_stopped_for_repeating_itself_was_cut_off():
    async with answering("vllm", changed(VLLM, "choices.0.finish_reason", "repetition")) as (engine, _):
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert (one.finish_reason, one.raw_finish_reason) == (FinishReason.LENGTH, "repetition")


async def test_choices_come_in_their_order():
    one, two = (changed(VLLM["choices"][0], "token_ids", ids) for ids in ([1, 2], [3, 4]))
    body = {**VLLM, "choices": [changed(two, "index", 1), one]}
    async with answering("vllm", body) as (engine, _):
        result = await engine.generate(PROMPT, Sampling(max_tokens=4), n=2)
        assert [list(each.ids) for each in result] == [[1, 2], [3, 4]]


CHANGED = [{"version": "7", "start": 0, "end": 1}, {"version": "8", "start": 1, "end": 2}]


@pytest.mark.parametrize(
    ("kind", "path", "listed", "versions"),
    [
        ("vllm", "choices.0.weight_versions", CHANGED, (("7", 0, 1), ("8", 1, 2))),
        ("vllm-generate", "choices.0.weight_versions", CHANGED, (("7", 0, 1), ("8", 1, 2))),
        ("sglang", "meta_info.weight_versions", CHANGED, (("7", 0, 1), ("8", 1, 2))),
        ("sglang", "meta_info.weight_version", "7", (("7", 0, 2),)),
        ("vllm", "choices.0.weight_versions", [*CHANGED, {"version": "9", "start": 2, "end": 2}], None),
        ("vllm", "choices.0.weight_versions", [CHANGED[0], {"version": "8", "start": 1, "end": 5}], None),
        ("vllm", "choices.0.weight_versions", None, ()),
    ],
)
async def test_weights_that_change_on_the_way_are_named_for_each_token(kind, path, listed, versions):
    body = changed(GOOD[kind], "meta_info.weight_version", None) if kind == "sglang" else GOOD[kind]
    async with answering(kind, changed(body, path, listed)) as (engine, _):
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert one.versions == ((("7", 0, 1), ("8", 1, 2)) if versions is None else versions)
        assert one.model_version == ("+".join(name for name, _, _ in one.versions) or None)


@pytest.mark.parametrize(
    "listed",
    [CHANGED[1:], CHANGED[:1], [CHANGED[1], CHANGED[0]], "7", [{**CHANGED[0], "start": None}], [CHANGED[0]] * 2],
)
async def test_versions_that_are_no_ranges_over_the_tokens_are_an_error(listed):
    async with answering("vllm", changed(VLLM, "choices.0.weight_versions", listed)) as (engine, _):
        with pytest.raises(BadResponse, match="versions of the weights"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))


async def test_a_route_that_is_not_there_names_the_switch():
    refusal = {"error": {"message": "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out."}}
    for status, body in ((403, refusal), (404, {"detail": "Not Found"})):
        async with answering("vllm-generate", (status, body)) as (engine, _):
            with pytest.raises(RequestRejected, match="start vLLM with --enable-scale-out"):
                await engine.generate(PROMPT, Sampling(max_tokens=4))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("vllm", "This model's maximum context length is 8 tokens. However, you requested 4 output tokens and ..."),
        ("vllm-generate", "The prompt (length 9) is longer than the maximum model length of 8."),
        ("sglang", "The input (9 tokens) is longer than the model's context length (8 tokens)."),
        ("sglang", "Input length (9 tokens) exceeds the maximum allowed length (8 tokens). Use a shorter input"),
        ("llama.cpp", "request (9 tokens) exceeds the available context size (8 tokens), try increasing it"),
    ],
)
async def test_the_words_for_a_context_that_is_full(kind, message):
    async with answering(kind, (400, {"error": {"message": message}})) as (engine, asked):
        with pytest.raises(ContextExhausted):
            await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert len(asked) == 1


@pytest.mark.parametrize(
    ("kind", "look"),
    [
        ("vllm", lambda sent: sent),
        ("vllm-generate", lambda sent: {**sent["sampling_params"], "priority": sent["priority"]}),
        ("sglang", lambda sent: {**sent["sampling_params"], "priority": sent["priority"]}),
        ("atropos", lambda sent: sent),
        ("llama.cpp", lambda sent: sent),
    ],
)
async def test_nothing_is_left_to_the_server(kind: str, look: Callable[[dict[str, Any]], dict[str, Any]]):
    settings = {"extra_body": {"priority": 1, "top_p": 0.5}}
    async with answering(kind, GOOD[kind], **settings) as (engine, asked):
        await engine.generate(PROMPT, Sampling(max_tokens=4, seed=3, stop=("x",), extra={"min_tokens": 2}))
        sent = look(asked[0])
        for name, off in (("temperature", 1.0), ("top_p", 1.0), ("min_p", 0.0), ("presence_penalty", 0.0)):
            assert sent[name] == off
        assert sent["frequency_penalty"] == 0.0
        assert sent.get("repetition_penalty", sent.get("repeat_penalty")) == 1.0
        assert sent["top_k"] in (0, -1)
        assert sent.get("max_tokens", sent.get("max_new_tokens", sent.get("n_predict"))) == 4
        assert sent.get("seed", sent.get("sampling_seed")) == 3
        assert sent["stop"] == ["x"]
        assert (sent["priority"], sent["min_tokens"]) == (1, 2)


def _of(choice: dict[str, Any], index: int) -> dict[str, Any]:
    return {**choice, "index": index, "weight_versions": [{"version": f"step-{index}", "start": 0, "end": 2}]}


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("vllm", {**VLLM, "choices": [_of(VLLM["choices"][0], index) for index in (0, 1)]}),
        ("vllm-generate", {**VLLM_GENERATE, "choices": [_of(VLLM_GENERATE["choices"][0], index) for index in (0, 1)]}),
        ("sglang", [{**SGLANG, "meta_info": {**SGLANG["meta_info"], "weight_version": f"step-{i}"}} for i in (0, 1)]),
    ],
)
async def test_each_completion_keeps_the_weights_that_it_was_sampled_from(kind: str, answer: Any):
    """A trainer may load new weights between two completions of one request."""
    async with answering(kind, answer) as (engine, _):
        managed = TokenServer([engine], PromptBuilder(fake_tokenizer()), "hermes").for_rollout()
        await managed.completion(prompt=PROMPT, n=2)
        assert [response.model_version for response in managed.completions()] == ["step-0", "step-1"]
        generated = await engine.generate(PROMPT, Sampling(max_tokens=4), n=2)
        assert [one.model_version for one in generated] == ["step-0", "step-1"]


@pytest.mark.parametrize(("kind", "place"), [("vllm", None), ("vllm-generate", "sampling_params")])
async def test_a_server_that_marks_its_texts_is_asked_not_to(kind: str, place: str | None):
    """vLLM with `--watermark-config` marks every completion that does not say otherwise."""
    async with answering(kind, GOOD[kind], GOOD[kind]) as (engine, asked):
        await engine.generate(PROMPT, Sampling(max_tokens=4))
        await engine.generate(PROMPT, Sampling(max_tokens=4, extra={"watermarking": True}))
        assert [(body[place] if place else body)["watermarking"] for body in asked] == [False, False]


async def test_llama_cpp_is_asked_again_for_what_it_left_out_from_the_end_and_never_twice():
    """Of ids 7 7 9 the server lists 7 and 9: which 7 it was is ambiguous, so both are looked up."""
    listed = [{"id": 7, "logprob": -1.0}, {"id": 9, "logprob": -3.0}]
    missing = {**LLAMA, "tokens": [7, 7, 9], "completion_probabilities": listed}

    def found(logprob: float) -> dict[str, Any]:
        others = [{"id": 1, "logprob": -0.1}, {"id": 7, "logprob": logprob}]
        entry = {"id": 4, "logprob": -20.0, "top_logprobs": others}
        return {**LLAMA, "tokens": [4], "completion_probabilities": [entry]}

    async with answering("llama.cpp", missing, {"tokens": [4]}, found(-2.0), found(-1.0)) as (engine, asked):
        [one] = await engine.generate(PROMPT, Sampling(max_tokens=4))
        assert (list(one.ids), list(one.logprobs)) == ([7, 7, 9], [-1.0, -2.0, -3.0])
        assert [body.get("prompt") for body in asked] == [PROMPT, None, [*PROMPT, 7], PROMPT]


async def test_a_logprob_that_is_nowhere_is_an_error_and_not_a_number():
    missing = {**LLAMA, "completion_probabilities": [{"id": 9, "logprob": -0.5}]}
    nothing = {**LLAMA, "completion_probabilities": [{"id": 4, "logprob": -20.0, "top_logprobs": []}]}
    async with answering("llama.cpp", missing, {"tokens": [4]}, nothing) as (engine, _):
        with pytest.raises(BadResponse, match="the server lists no logprob for token 2"):
            await engine.generate(PROMPT, Sampling(max_tokens=4))


def test_settings_that_would_hide_tokens_are_rejected():
    with pytest.raises(ValueError, match=r"openai\.extra_body sets echo, stream"):
        create_engine("vllm", ServerSettings("http://x/v1", "m", extra_body={"stream": True, "echo": True}))


def test_every_fault_of_a_server_is_tried_here():
    of_proof = {"truncated_prompt", "no_echo", "no_usage", "replayed", "replayed_prompt"}  # test_server_proof.py
    elsewhere = {*of_proof, "behind_stop"}  # test_stop_texts.py
    assert {each.value for each in Fault} - TOKENS == {*PASSES, *LIES, *elsewhere, "hang"}
