"""The Tinker SDK against the engine, unmodified, and what the wire promises beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import tinker
from tinker import types
from tinker.proto import tinker_public_pb2 as messages

from backends.errors import SettingsError
from lachesis_train.engine import server, start_engine
from lachesis_train.engine.errors import EngineStartError
from lachesis_train.engine.model import Model
from lachesis_train.engine.wire import sample_request
from lachesis_train.verbs.engine import main
from tests.support.strangers import check_refused
from tests.support.training_models import done

Ints = types.ModelInput.from_ints


def datum(tokens: list[int], advantage: float = 1.0, logprobs: list[float] | None = None) -> types.Datum:
    count = len(tokens) - 1
    return types.Datum(
        model_input=Ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tokens[1:],
            "logprobs": logprobs or [-5.6] * count,
            "advantages": [advantage] * count,
        },
    )


def supervised(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=Ints(tokens[:-1]), loss_fn_inputs=inputs)


def train(trainer: Any, steps: int, rate: float = 1e-2) -> list[float]:
    losses = []
    for _ in range(steps):
        result = trainer.forward_backward([supervised([65, 66, 67, 68, 69])], "cross_entropy").result()
        losses.append(result.metrics["loss:sum"])
        trainer.optim_step(types.AdamParams(learning_rate=rate)).result()
    return losses


def test_a_reinforcement_step_trains_and_its_weights_sample(service: Any) -> None:
    trainer = done(service.create_lora_training_client("tiny", rank=8, seed=1))
    path = trainer.save_weights_for_sampler("step0").result().path
    sampler = done(service.create_sampling_client(model_path=path))
    prompt = [65, 66, 67]
    answer = sampler.sample(Ints(prompt), 4, types.SamplingParams(max_tokens=8, stop=[])).result()
    sequences = list(answer.sequences)
    assert [(len(one.tokens), one.stop_reason) for one in sequences] == [(8, "length")] * 4
    data = [
        datum(prompt + one.tokens, (-1.0) ** number, [0.0, 0.0, *one.logprobs]) for number, one in enumerate(sequences)
    ]
    result = trainer.forward_backward(data, "importance_sampling").result()
    for one, output in zip(sequences, result.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(output["logprobs"].tolist()[2:], one.logprobs, atol=1e-5)
    metrics = trainer.optim_step(types.AdamParams(learning_rate=1e-2, grad_clip_norm=0.1)).result().metrics
    assert metrics["grad_norm"] > 0.1 and metrics["clipped"] == 1.0
    newer = done(trainer.save_weights_and_get_sampling_client())
    whole = Ints(prompt + sequences[0].tokens)
    before, after = sampler.compute_logprobs(whole).result(), newer.compute_logprobs(whole).result()
    np.testing.assert_allclose(before[3:], sequences[0].logprobs, atol=1e-5)
    assert sum(after[3:]) > sum(before[3:])  # its advantage was 1


def test_the_base_model_samples_and_says_its_tokenizer(service: Any) -> None:
    sampler = done(service.create_sampling_client(base_model="tiny"))
    prompt = Ints([65, 66])
    first, again = (
        sampler.sample(prompt, 1, types.SamplingParams(max_tokens=5, seed=3)).result().sequences[0] for _ in "12"
    )
    assert first.tokens == again.tokens
    trainer = done(service.create_lora_training_client("tiny", rank=4))
    tokenizer = trainer.get_tokenizer()
    assert tokenizer.encode("hé") == [104, 195, 169]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    messages = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
    assert "weather" in text and text.endswith("<|im_start|>assistant\n")


def test_prompt_logprobs_and_the_most_likely_tokens(service: Any) -> None:
    sampler = done(service.create_sampling_client(base_model="tiny"))
    answer = sampler.sample(
        Ints([65, 66, 67, 68]),
        1,
        types.SamplingParams(max_tokens=2, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
    ).result()
    assert answer.prompt_logprobs[0] is None and all(value < 0 for value in answer.prompt_logprobs[1:])
    assert [len(row or ()) for row in answer.topk_prompt_logprobs] == [0, 3, 3, 3]
    for row in answer.topk_prompt_logprobs[1:]:
        assert [value for _, value in row] == sorted((value for _, value in row), reverse=True)


def test_a_custom_loss_has_the_gradients_of_its_formula(service: Any) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        return -sum(one.sum() for one in logprobs), {"mine": 1.0}

    plain, custom = (done(service.create_lora_training_client("tiny", rank=4, seed=7)) for _ in "12")
    expected = train(plain, 3)
    found = []
    data = [types.Datum(model_input=Ints([65, 66, 67, 68]), loss_fn_inputs={"target_tokens": [66, 67, 68, 69]})]
    for _ in range(3):
        result = custom.forward_backward_custom(data, loss).result()
        assert result.metrics["mine"] == 1.0
        custom.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        check = custom.forward([supervised([65, 66, 67, 68, 69])], "cross_entropy").result()
        found.append(check.metrics["loss:sum"])
    np.testing.assert_allclose(found[:2], expected[1:], atol=1e-4)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda t, s: t.forward_backward([datum([1, 2, 3])], "dro").result(), "loss_fn 'dro'"),
        (lambda t, s: t.forward_backward([supervised([65] * 5000)], "cross_entropy").result(), "4999 tokens"),
        (lambda t, s: t.optim_step(types.AdamParams()).result(), "there are no gradients"),
        (lambda t, s: t.optim_step(types.AdamParams(beta1=1.5)).result(), "beta1 1.5"),
        (lambda t, s: t.save_state("a/b").result(), "checkpoint name 'a/b'"),
        (
            lambda t, s: s.sample(Ints([65] * 5000), 1, types.SamplingParams(max_tokens=1)).result(),
            "exceed the context",
        ),
        (lambda t, s: s.sample(Ints([65]), 1, types.SamplingParams(top_p=0.0)).result(), "top_p is 0.0"),
    ],
)
def test_a_bad_request_is_the_users_error_and_the_engine_goes_on(
    service: Any, ask: Callable[[Any, Any], Any], message: str
) -> None:
    trainer = done(service.create_lora_training_client("tiny", rank=4))
    sampler = done(service.create_sampling_client(base_model="tiny"))
    with pytest.raises(tinker.RequestFailedError, match=message) as error:
        ask(trainer, sampler)
    assert error.value.category == types.RequestErrorCategory.User
    train(trainer, 1)


def test_what_is_not_there_is_refused_by_name(service: Any) -> None:
    with pytest.raises(tinker.RequestFailedError, match="base model 'gpt' is not served here; this engine serves"):
        done(service.create_lora_training_client("gpt"))
    with pytest.raises(tinker.APIStatusError, match="there is no checkpoint tinker://x/sampler_weights/y"):
        done(service.create_sampling_client(model_path="tinker://x/sampler_weights/y"))


def test_training_goes_on_in_an_engine_that_was_started_again(folder: Path, tmp_path: Path) -> None:
    async def played(act: Callable[[Any], Any]) -> Any:
        engine = server.TrainingEngine(Model(folder), tmp_path, names=("tiny",))
        async with server.serve(engine, "127.0.0.1", 0) as url:
            service = await asyncio.to_thread(tinker.ServiceClient, base_url=url, api_key="tml-local")
            return await asyncio.to_thread(act, service)

    def first(service: Any) -> tuple[str, list[float]]:
        trainer = done(service.create_lora_training_client("tiny", rank=4, seed=2))
        train(trainer, 2)
        path = trainer.save_state("two").result().path
        return path, train(trainer, 2)

    path, wanted = asyncio.run(played(first))

    def second(service: Any) -> list[float]:
        return train(done(service.create_training_client_from_state_with_optimizer(path)), 2)

    np.testing.assert_allclose(asyncio.run(played(second)), wanted, rtol=1e-5)


@asynccontextmanager
async def raw(folder: Path, state_dir: Path) -> AsyncIterator[tuple[server.TrainingEngine, Callable[..., Any]]]:
    """An engine of this process, and a function that posts to it."""
    engine = server.TrainingEngine(Model(folder), state_dir, names=("tiny",))
    async with server.serve(engine, "127.0.0.1", 0) as url, aiohttp.ClientSession(url) as http:

        async def post(path: str, body: Any, **settings: Any) -> tuple[int, Any]:
            kind = {"data": body} if isinstance(body, bytes) else {"json": body}
            async with http.post(f"/api/v1/{path}", **kind, **settings) as answer:
                return answer.status, await answer.json() if answer.content_type.endswith(
                    "json"
                ) else await answer.read()

        yield engine, post


async def created(post: Callable[..., Any]) -> str:
    """A training model over the raw wire; its id."""
    session = (await post("create_session", {}))[1]["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4, "seed": 0}}
    promise = (await post("create_model", body))[1]
    return str((await fetched(post, promise))["model_id"])


async def fetched(post: Callable[..., Any], promise: dict[str, Any]) -> Any:
    while True:
        status, result = await post("retrieve_future", {"request_id": promise["request_id"]})
        if status != 408:
            assert status == 200, result
            return result


def forward_backward_body(model_id: str, seq_id: int) -> bytes:
    message = messages.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.arange(65, 70, dtype=np.int32).tobytes()
    for name, values in {"target_tokens": np.arange(66, 71), "weights": np.ones(5, np.float32)}.items():
        tensor = one.loss_fn_inputs[name]
        tensor.dense, tensor.shape[:] = values.tobytes(), [5]
        tensor.dtype = messages.DTYPE_FLOAT32 if name == "weights" else messages.DTYPE_INT64
    return bytes(message.SerializeToString())


PROTOBUF = {"headers": {"Content-Type": server.PROTOBUF}}


async def test_requests_run_in_the_order_of_their_numbers(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (_engine, post):
        model_id = await created(post)
        step = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 1e-2}}
        _, second = await post("optim_step", step)  # first, it would find no gradients
        _, first = await post("forward_backward", forward_backward_body(model_id, 1), **PROTOBUF)
        assert (await fetched(post, second))["metrics"]["step"] == 1.0
        assert isinstance(await fetched(post, first), bytes)


async def test_a_request_that_is_sent_again_is_run_once(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (engine, post):
        model_id = await created(post)
        for _ in range(3):
            await post("forward_backward", forward_backward_body(model_id, 1), **PROTOBUF)
            _, promise = await post("optim_step", {"model_id": model_id, "seq_id": 2})
        assert (await fetched(post, promise))["metrics"]["step"] == 1.0
        assert engine.training[model_id].model.steps == 1


async def test_a_number_that_never_comes_holds_up_nobody_for_ever(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lachesis_train.engine.ordering.GAP_SECONDS", 0.01)
    async with raw(folder, tmp_path) as (_, post):
        model_id = await created(post)
        _, later = await post("forward_backward", forward_backward_body(model_id, 5), **PROTOBUF)
        assert isinstance(await fetched(post, later), bytes)
        _, late = await post("forward_backward", forward_backward_body(model_id, 4), **PROTOBUF)
        assert "seq_id 4 came after 5" in (await fetched(post, late))["error"]


async def test_a_result_that_takes_long_is_polled_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "POLL_SECONDS", 0.01)
    async with raw(folder, tmp_path) as (engine, post):
        release = threading.Event()
        engine.worker.run(release.wait)
        session = (await post("create_session", {}))[1]["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        _, promise = await post("create_model", body)
        status, answer = await post("retrieve_future", promise)
        assert (status, answer["type"]) == (408, "try_again")
        release.set()
        assert (await fetched(post, promise))["type"] == "create_model"


async def test_requests_of_several_versions_and_clients_are_sampled_together(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (_engine, post):
        model_id = await created(post)
        session, paths, seq_id = model_id.partition(":")[0], [], 1
        for version in range(2):
            for path, body in (
                ("forward_backward", forward_backward_body(model_id, seq_id)),
                ("optim_step", {"model_id": model_id, "seq_id": seq_id + 1, "adam_params": {"learning_rate": 0.05}}),
                ("save_weights_for_sampler", {"model_id": model_id, "seq_id": seq_id + 2, "path": f"v{version}"}),
            ):
                result = await fetched(
                    post, (await post(path, body, **(PROTOBUF if isinstance(body, bytes) else {})))[1]
                )
            paths.append(result["path"])
            seq_id += 3
        samplers = []
        for number, path in enumerate([None, *paths]):
            body = {"session_id": session, "sampling_session_seq_id": number, "model_path": path, "base_model": "tiny"}
            samplers.append((await post("create_sampling_session", body))[1]["sampling_session_id"])

        async def sampled(sampler: str, seq_id: int) -> list[int]:
            body = {
                "sampling_session_id": sampler,
                "seq_id": seq_id,
                "prompt": {"chunks": [{"tokens": [65, 66, 67]}]},
                "sampling_params": {"max_tokens": 40, "seed": 4, "stop": []},
            }
            response = messages.SampleResponse.FromString(await fetched(post, (await post("asample", body))[1]))
            return list(np.frombuffer(response.sequences[0].tokens, np.int32))

        alone = [await sampled(sampler, 0) for sampler in samplers]
        assert len(set(map(tuple, alone))) == 3
        together = await asyncio.gather(*(sampled(sampler, n) for n in range(1, 4) for sampler in samplers))
        assert together == alone * 3


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("asample", b"{", 422, "the body is not valid JSON"),
        ("optim_step", [1], 422, "not a JSON object"),
        ("create_model", {}, 422, "the request has no 'session_id'"),
        ("session_heartbeat", {"session_id": "gone"}, 404, "the engine was started again"),
        ("forward_backward", b"\xff\xff", 422, "not a ForwardBackwardRequest"),
        ("retrieve_future", {"request_id": "gone"}, 410, "is unknown"),
    ],
)
async def test_a_body_that_makes_no_sense_is_answered(
    folder: Path, tmp_path: Path, path: str, body: Any, status: int, message: str
) -> None:
    async with raw(folder, tmp_path) as (_, post):
        found, answer = await post(path, body, **(PROTOBUF if path == "forward_backward" else {}))
        assert found == status and message in answer["detail"]


async def test_bytes_that_do_not_fit_are_the_users_error(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (_, post):
        model_id = await created(post)
        for number, (change, text) in enumerate(
            (
                (lambda datum: datum.loss_fn_inputs["weights"].shape.append(2), "'weights' has bytes that do not fit"),
                (lambda datum: setattr(datum.loss_fn_inputs["weights"], "dense", b"123"), "'weights' has bytes that"),
                (lambda datum: setattr(datum.model_input[0].encoded_text, "tokens", b"12345"), "5 bytes of tokens"),
            ),
            1,
        ):
            message = messages.ForwardBackwardRequest.FromString(forward_backward_body(model_id, number))
            change(message.data[0])
            _, promise = await post("forward_backward", bytes(message.SerializeToString()), **PROTOBUF)
            result = await fetched(post, promise)
            assert result["category"] == "user" and "datum 0" in result["error"] and text in result["error"]


async def test_a_cancelled_request_is_answered_and_forgotten(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (engine, post):
        body = {"prompt": {"chunks": [{"tokens": [65]}]}, "sampling_params": {"max_tokens": 4000, "stop": []}}
        _, promise = await post("asample", body)
        await post("cancel_future", {"request_id": promise["request_id"]})
        assert "was cancelled" in (await fetched(post, promise))["error"]
        assert not engine.samplers._requests


async def test_a_session_that_ends_while_its_model_is_made_leaves_no_adapter(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (engine, post):
        release = threading.Event()
        engine.worker.run(release.wait)
        session = (await post("create_session", {}))[1]["session_id"]
        _, promise = await post("create_model", {"session_id": session, "model_seq_id": 0, "base_model": "tiny"})
        await post(f"sessions/{session}/finish", {})
        release.set()
        assert "ended before it was made" in (await fetched(post, promise))["error"]
        assert not engine.model.network.peft_config


async def test_a_training_state_is_not_sampled_for_it_may_be_overwritten(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (_, post):
        model_id = await created(post)
        saved = await fetched(post, (await post("save_weights", {"model_id": model_id, "seq_id": 1, "path": "a"}))[1])
        body = {"session_id": model_id.partition(":")[0], "sampling_session_seq_id": 0, "model_path": saved["path"]}
        status, answer = await post("create_sampling_session", body)
        assert status == 422 and "training state" in answer["detail"]


async def test_what_waits_fails_when_the_engine_shuts_down(folder: Path, tmp_path: Path) -> None:
    async with raw(folder, tmp_path) as (engine, _post):
        failed: list[Any] = []
        release = threading.Event()
        engine.worker.run(release.wait)
        waiting = engine.worker.run(lambda: None)
        request = sample_request(engine.model, {"prompt": {"chunks": [{"tokens": [65]}]}}, failed.append)
        engine.worker.sample(None, request)
        threading.Timer(0.05, release.set).start()
    assert "shutting down" in str(waiting.exception()) and "shutting down" in str(failed[0])


async def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(EngineStartError, match=r"status 2 .* log.*(?s:.*)'/nowhere': .* is not a model folder"):
        async with start_engine("/nowhere"):
            pass


def test_a_model_that_cannot_be_loaded_and_settings_that_cannot_be_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(SettingsError, match="cannot be loaded"):
        main(["--model", str(tmp_path), "--port", "0"])
    with pytest.raises(SystemExit):
        main(["--model", "tiny", "--lora-layers", "0"])
    assert "0 is not at least 1" in capsys.readouterr().err


def test_the_engine_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import asyncio\nfrom lachesis_train.engine import start_engine\n"
            "async def main():\n"
            f"    async with start_engine('tiny', state_dir={str(tmp_path)!r}) as url:\n"
            "        print(url, flush=True)\n"
            "        await asyncio.sleep(600)\n"
            "asyncio.run(main())",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None and parent.stdout.readline().startswith("http://")
    engines = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert len(engines) == 1
    engine = os.pidfd_open(int(engines[0]))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    import select

    assert select.select([engine], [], [], 60)[0], "the engine still runs"
    os.close(engine)


async def test_no_web_page_and_no_other_user_is_answered(engine: str) -> None:
    await check_refused(f"{engine}/api/v1/get_server_capabilities")
