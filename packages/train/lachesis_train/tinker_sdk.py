"""The `tinker` SDK, versions 0.25 to 0.38, as the few calls that a trainer makes.

The versions differ in what calls return: clients or futures of clients, futures that can be awaited or those of
`concurrent.futures`. All of that is here; the rest of the training code sees coroutines and plain lists.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from backends.errors import ExitCode, LachesisError
from lachesis_train.policy import Sampled

LOCAL_KEY: Final = "tml-local"
"""The API key for an engine of our own. The SDK takes only keys that begin with `tml-`."""

Metrics = Mapping[str, float]


class MissingPackage(LachesisError):
    """The packages of training are not installed."""

    exit_code = ExitCode.SETTINGS


class TrainingEngineError(LachesisError):
    """The engine refused or failed a call."""

    weights_known: ClassVar = False
    """Whether the weights in the engine are those from before the step, so that another try goes on from them."""

    def __init__(self, what: str, error: BaseException, *, final: bool = False) -> None:
        super().__init__(f"the engine cannot {what}: {type(error).__name__}: {error}")
        self.final = final
        """Whether the request itself is at fault, so that another try would not help."""


class RefusedBounds(TrainingEngineError):
    """The engine has the loss, but not its parameters, as `cispo` of SkyRL's fsdp and megatron backends."""

    def __init__(self, loss: str, refused: Sequence[str], error: BaseException) -> None:
        super().__init__(f"use the loss {loss} with {' and '.join(refused)}", error, final=True)
        self.args = (
            f"{self}; set training.loss to importance_sampling without max_importance_ratio, or to ppo if the engine "
            "has it, or keep the loss with training.clip_low and clip_high null, for the engine's own bounds (cispo in "
            "SkyRL 0.4.0: 0 and 5)",
        )


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence of a batch. All of its lists are equally long."""

    tokens: Sequence[int]
    """The input: token t predicts target t."""
    targets: Sequence[int]
    """The token after each input token."""
    inputs: Mapping[str, Sequence[float] | NDArray[np.float32]]
    """What the loss takes for each target: `logprobs` and `advantages`, or `weights` for cross-entropy."""


@dataclass(frozen=True, slots=True)
class Adam:
    """One step of Adam."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """Greatest norm of the gradient; 0: any."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The engine's answer to a step."""

    logprobs: Sequence[Sequence[float]]
    """Of the targets of each datum, under the weights before the step."""
    metrics: Metrics
    """Those of the loss and of the optimizer, as the engine names them."""


@dataclass(frozen=True, slots=True)
class LossPart:
    """The part of a batch that has one loss."""

    places: Sequence[int]
    """Of its data in the batch."""
    loss: str
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The adapter that is trained."""

    rank: int = 32
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True


def is_configured(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the SDK would find a service by itself: a URL, a key, or a stored key."""
    names = ("TINKER_BASE_URL", "TINKER_API_KEY", "TINKER_CREDENTIAL_CMD")
    stored = os.path.expanduser("~/.tinker/credentials.json")  # noqa: PTH111
    return any(environ.get(name) for name in names) or os.path.exists(stored)  # noqa: PTH110


class Service:
    """A service that speaks Tinker's wire.

    Args:
        base_url, api_key: None leaves them to the SDK: `TINKER_BASE_URL`, `TINKER_API_KEY`, a stored key.

    Raises:
        MissingPackage: `tinker` is not installed.
        EngineError: there is no key, or one that the SDK does not take.
    """

    def __init__(self, base_url: str | None = None, api_key: str | None = None) -> None:
        tinker = _tinker()
        try:
            self._client = tinker.ServiceClient(base_url=base_url, api_key=api_key)
        except Exception as error:
            raise TrainingEngineError("be reached", error, final=True) from error
        self._rest: Callable[[], Any] = self._client.create_rest_client
        if not _is_old():  # there that one is deprecated
            self._rest = partial(tinker.RestClient, base_url=base_url, api_key=api_key)

    async def train(self, base_model: str, shape: LoraShape) -> Training:
        """A new adapter."""
        create = self._client.create_lora_training_client
        client = await _call(f"train {base_model}", create, base_model, **_fields(shape))
        return Training(self._rest, client)

    async def resume(self, path: str, base_model: str, shape: LoraShape, *, optimizer: bool = True) -> Training:
        """The adapter of this shape that `Training.save_state` saved, with the state of its optimizer or a new one."""
        what, end = f"load {path}", "_with_optimizer" if optimizer else ""
        if _is_old():  # there that asks for the shape of the adapter, which not every server can say
            training = await self.train(base_model, shape)
            await _call(what, getattr(training.client, f"load_state{end}"), path)
            return training
        load = getattr(self._client, f"create_training_client_from_state{end}")
        return Training(self._rest, await _call(what, load, path))

    async def base_sampler(self, base_model: str) -> TinkerSampler:
        """The base model, without an adapter."""
        create = self._client.create_sampling_client
        return TinkerSampler(await _call(f"sample from {base_model}", create, base_model=base_model))

    async def close(self) -> None:
        """End the session, where the SDK can."""
        if hasattr(self._client, "close"):
            await _call("end the session", self._client.close, "success")


class Training:
    """An adapter that is trained. One call at a time."""

    def __init__(self, rest: Callable[[], Any], client: Any) -> None:
        self._rest = rest
        self.client = client

    async def step(
        self, data: Sequence[Datum], loss: str, adam: Adam, loss_config: Mapping[str, float] | None = None
    ) -> Trained:
        """`step_in_parts` with one part: the whole of `data`."""
        return await self.step_in_parts(data, [LossPart(range(len(data)), loss, loss_config or {})], adam)

    async def step_in_parts(self, data: Sequence[Datum], parts: Sequence[LossPart], adam: Adam) -> Trained:
        """Gradients of the summed losses of the parts of `data`, then a step of Adam. All is sent before the first
        answer.

        Raises:
            EngineError: the weights may have changed or not; load a state before another try.
        """
        tinker = _tinker()
        batch = [_to_tinker(tinker, datum) for datum in data]
        params = tinker.AdamParams(**_fields(adam))
        sent = []
        for part in parts:
            of_part = [batch[place] for place in part.places]
            call = self.client.forward_backward
            sent.append(await asyncio.to_thread(call, of_part, part.loss, dict(part.parameters) or None))
        optim = await asyncio.to_thread(self.client.optim_step, params)
        logprobs: list[list[float]] = [[] for _ in data]
        metrics: dict[str, float] = {}
        for at, (part, forward) in enumerate(zip(parts, sent, strict=True)):
            try:
                output = await _settled(forward)
            except BaseException as error:
                await asyncio.gather(*map(_settled, [*sent[at + 1 :], optim]), return_exceptions=True)
                if refused := [name for name in part.parameters if name in str(error)]:
                    raise RefusedBounds(part.loss, refused, error) from error
                raise _engine_error("compute gradients", error) from error
            for place, each in zip(part.places, output.loss_fn_outputs, strict=True):
                logprobs[place] = _plain(each["logprobs"])
            _add(metrics, output.metrics, len(part.places) / len(data))
        stepped = await _call("make a step", lambda: optim)
        return Trained(logprobs, {**metrics, **(getattr(stepped, "metrics", None) or {})})

    async def forward(self, data: Sequence[Datum], loss: str = "cross_entropy") -> Trained:
        """The same without gradients."""
        tinker = _tinker()
        batch = [_to_tinker(tinker, datum) for datum in data]
        output = await _call("compute logprobs", self.client.forward, batch, loss)
        return Trained([_plain(each["logprobs"]) for each in output.loss_fn_outputs], output.metrics)

    async def save_state(self, name: str) -> str:
        """Save the adapter and the state of its optimizer; the path to load them from."""
        return str((await _call("save its state", self.client.save_state, name)).path)

    async def save_sampler(self, name: str) -> str:
        """Save the adapter for sampling; its path."""
        return str((await _call("save weights for sampling", self.client.save_weights_for_sampler, name)).path)

    async def forget(self, path: str) -> None:
        """Delete a saved state, or weights that were saved for sampling."""
        rest = await asyncio.to_thread(self._rest)
        await _call(f"delete {path}", rest.delete_checkpoint_from_tinker_path, path)

    async def sampler(self) -> TinkerSampler:
        """The weights as they are now, for sampling. The engine keeps them as long as something samples them."""
        create = self.client.save_weights_and_get_sampling_client
        return TinkerSampler(await _call("serve its weights", create))


@dataclass(frozen=True, slots=True)
class TinkerSampler:
    """A `lachesis_train.policy.Sampler` over a sampling client."""

    client: Any = field(repr=False)

    async def sample(
        self,
        prompt_ids: list[int],
        *,
        n: int,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop: list[str] | list[int] | None,
    ) -> list[Sampled]:
        """See `Sampler.sample`."""
        tinker = _tinker()
        params = tinker.SamplingParams(
            max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop
        )
        try:
            answer = await _call("sample", self.client.sample, tinker.ModelInput.from_ints(prompt_ids), n, params)
        except TrainingEngineError as error:
            if error.final:
                raise ValueError(str(error)) from error
            raise
        return [Sampled(list(each.tokens), list(each.logprobs), each.stop_reason) for each in answer.sequences]

    async def logprobs(self, ids: list[int]) -> list[float]:
        """See `Sampler.logprobs`. The first one is NaN."""
        found = await _call("compute logprobs", self.client.compute_logprobs, _tinker().ModelInput.from_ints(ids))
        return [math.nan if each is None else float(each) for each in found]


def _tinker() -> Any:
    try:
        import tinker
    except ImportError as error:
        raise MissingPackage(f'training needs the tinker SDK ({error}); pip install "lachesis-rl[torch]"') from error
    return tinker


def _is_old() -> bool:
    """Whether clients are returned as they are, not as futures."""
    return not hasattr(_tinker(), "RestClient")


def _to_tinker(tinker: Any, datum: Datum) -> Any:
    inputs: dict[str, Any] = {name: np.asarray(values, np.float32) for name, values in datum.inputs.items()}
    inputs["target_tokens"] = np.asarray(datum.targets, np.int64)
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(list(datum.tokens)), loss_fn_inputs=inputs)


def _plain(tensor: Any) -> list[float]:
    return [float(value) for value in tensor.data]


def _add(metrics: dict[str, float], of_part: Metrics, share: float) -> None:
    """Add the figures of a part, which has this share of the data: their names end with how they are put together."""
    for name, value in of_part.items():
        known = metrics.get(name)
        match name.rpartition(":")[2]:
            case "mean":
                metrics[name] = (known or 0.0) + share * value
            case "max" | "min" as kind if known is not None:
                metrics[name] = max(known, value) if kind == "max" else min(known, value)
            case _:
                metrics[name] = value if known is None or name.endswith((":max", ":min")) else known + value


def _fields(values: LoraShape | Adam) -> dict[str, Any]:
    return {name: getattr(values, name) for name in values.__slots__}


async def _call(what: str, call: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return await _settled(await asyncio.to_thread(call, *args, **kwargs))
    except Exception as error:
        raise _engine_error(what, error) from error


async def _settled(value: Any) -> Any:
    if hasattr(value, "result_async"):
        return await value.result_async()
    if isinstance(value, concurrent.futures.Future):
        return await asyncio.wrap_future(value)
    return value


def _engine_error(what: str, error: BaseException) -> BaseException:
    if not isinstance(error, Exception):
        return error
    category = str(getattr(error, "category", "")).rpartition(".")[2].lower()
    status = getattr(error, "status_code", 0)
    final = (
        category == "user" or isinstance(error, ValueError) or (400 <= status < 500 and status not in (408, 409, 429))
    )
    return TrainingEngineError(what, error, final=final)
