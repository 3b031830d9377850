"""Tinker's messages: what the protobuf classes of the SDK and its JSON bodies mean to the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from tinker.proto import tinker_public_pb2 as messages

from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.model import Model
from lachesis_train.engine.sampling import SamplingParameters, SamplingTask
from lachesis_train.engine.training import ForwardBackward, TrainingDatum

_DTYPES: Final = {
    messages.DTYPE_FLOAT32: np.float32,
    messages.DTYPE_INT64: np.int64,
    messages.DTYPE_INT32: np.int32,
}
_UNSUPPORTED_SAMPLING: Final = ("target_prompt_logprobs", "prompt_alt_tokens_k", "record_stability_info")


def parse_forward_backward(body: bytes) -> Any:
    """The protobuf message. Raises RequestError for bytes that are none."""
    from google.protobuf.message import DecodeError

    request = messages.ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise RequestError(f"the body of forward_backward is not a ForwardBackwardRequest: {error}") from None
    return request


def data_of(request: Any) -> list[TrainingDatum]:
    """The data of a ForwardBackwardRequest."""
    return [
        TrainingDatum(
            np.concatenate([np.empty(0, np.int64), *(_chunk_tokens(place, chunk) for chunk in datum.model_input)]),
            {name: _array(place, name, tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for place, datum in enumerate(request.data)
    ]


def _chunk_tokens(place: int, chunk: Any) -> np.ndarray:
    if not chunk.HasField("encoded_text"):
        raise RequestError(f"datum {place} has a chunk that is not text; the embedded engine takes tokens only")
    if len(chunk.encoded_text.tokens) % 4:
        raise RequestError(f"datum {place} has {len(chunk.encoded_text.tokens)} bytes of tokens, which have 4 each")
    return np.frombuffer(chunk.encoded_text.tokens, np.int32).astype(np.int64)


def _array(place: int, name: str, tensor: Any) -> np.ndarray:
    if tensor.HasField("sparse_csr") or tensor.dtype not in _DTYPES:
        raise RequestError(f"datum {place}: {name!r} must be a dense tensor of float32, int64 or int32")
    try:
        return np.frombuffer(tensor.dense, _DTYPES[tensor.dtype]).reshape(list(tensor.shape) or -1)
    except ValueError as error:
        raise RequestError(f"datum {place}: {name!r} has bytes that do not fit its type and shape: {error}") from None


def loss_config_of(request: Any) -> dict[str, float]:
    """`loss_fn_config` of a ForwardBackwardRequest. The SDK 0.25 has the older of its two fields only."""
    newer = getattr(request, "loss_fn_config_v2", {})
    for key, value in newer.items():
        if value.HasField("text"):
            raise RequestError(f"loss_fn_config key {key!r} is a text; the losses of the embedded engine take numbers")
    return {key: value.number for key, value in newer.items()} or dict(request.loss_fn_config)


def encode_forward_backward(result: ForwardBackward) -> bytes:
    """A ForwardBackwardOutput."""
    output = messages.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=result.metrics)
    record = output.loss_fn_outputs.add()
    record.num_datums = len(result.logprobs)
    tensor = record.fields["logprobs"]
    tensor.dtype = messages.DTYPE_FLOAT32
    tensor.data = np.concatenate(result.logprobs).astype(np.float32).tobytes()
    ends = np.cumsum([0, *(4 * len(one) for one in result.logprobs)])
    tensor.offsets = ends.astype(np.int64).tobytes()
    return bytes(output.SerializeToString())


def sample_request(model: Model, body: Mapping[str, Any], done: Any) -> SamplingTask:
    """A Request of the JSON of `asample`. Raises RequestError for what the engine does not do."""
    for name in _UNSUPPORTED_SAMPLING:
        if body.get(name):
            raise RequestError(f"{name} is not one of the options of sampling that the embedded engine has")
    prompt: list[int] = []
    for chunk in body["prompt"]["chunks"]:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise RequestError(
                f"the prompt has a chunk of type {chunk['type']!r}; the embedded engine takes tokens only"
            )
        prompt += map(int, chunk["tokens"])
    wanted = dict(body.get("sampling_params") or {})
    limit = max(1, model.context_length - len(prompt))
    max_tokens = wanted.get("max_tokens")
    stop_ids, stop_texts = _stops(model, wanted.get("stop"))
    seed = wanted.get("seed")
    last = body.get("prompt_logprobs_last_n")
    scored = body.get("prompt_logprobs") or body.get("topk_prompt_logprobs")
    return SamplingTask(
        prompt=prompt,
        count=int(body.get("num_samples") or 1),
        parameters=SamplingParameters(
            max_tokens=limit if max_tokens is None else int(max_tokens),
            temperature=float(wanted.get("temperature", 1.0)),
            top_p=float(wanted.get("top_p", 1.0)),
            top_k=int(wanted.get("top_k", -1)),
            seed=None if seed is None else int(seed),
            stop_ids=stop_ids,
            stop_texts=stop_texts,
        ),
        done=done,
        topk=int(body.get("topk_sample_logprobs") or 0),
        prompt_logprobs=(int(last) if last else len(prompt)) if scored else 0,
        prompt_topk=int(body.get("topk_prompt_logprobs") or 0),
    )


def _stops(model: Model, stop: str | Sequence[str] | Sequence[int] | None) -> tuple[frozenset[int], tuple[str, ...]]:
    """Token ids and texts that end a sequence. The end of a turn always does, unless `stop` is the empty list."""
    if stop is None:
        return model.end_ids, ()
    if isinstance(stop, str):
        stop = [stop]
    if not stop:
        return frozenset(), ()
    texts = tuple(one for one in stop if isinstance(one, str))
    if not all(texts):
        raise RequestError("stop has an empty text")
    if not all(isinstance(one, str | int) for one in stop):
        raise RequestError("stop must have texts or ids of tokens")
    return model.end_ids | {one for one in stop if isinstance(one, int)}, texts


def encode_samples(request: SamplingTask) -> bytes:
    """A SampleResponse of a request that is done."""
    response = messages.SampleResponse()
    for sequence in request.sequences:
        stopped = messages.STOP_REASON_STOP if sequence.stopped else messages.STOP_REASON_LENGTH
        message = response.sequences.add(
            stop_reason=stopped,
            tokens=np.array(sequence.tokens, np.int32).tobytes(),
            logprobs=np.array(sequence.logprobs, np.float32).tobytes(),
        )
        if request.topk:
            _encode_topk(message.topk_sampled_logprobs, 0, sequence.topk)
    if request.prompt_logprobs:
        unknown = len(request.prompt) - len(request.found_prompt)
        values = [float("nan")] * unknown + request.found_prompt
        response.prompt_logprobs = np.array(values, np.float32).tobytes()
        if request.prompt_topk:
            _encode_topk(response.topk_prompt_logprobs, unknown, request.found_prompt_topk)
    return bytes(response.SerializeToString())


def _encode_topk(message: Any, unknown: int, rows: Sequence[tuple[list[int], list[float]]]) -> None:
    width = len(rows[0][0]) if rows else 0
    ids = np.zeros((unknown + len(rows), width), np.int32)
    logprobs = np.full(ids.shape, -99999.0, np.float32)  # the wire's mark of an empty cell
    for place, (tokens, values) in enumerate(rows, unknown):
        ids[place], logprobs[place] = tokens, values
    message.k = width
    setattr(message, "length" if hasattr(message, "length") else "prompt_length", len(ids))  # the latter in 0.25
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
