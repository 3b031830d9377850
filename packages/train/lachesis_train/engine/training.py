"""Training models: gradients of a batch, and optimizer steps."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.limits import ACTIVATIONS_OF_A_GPU, LOGITS_AT_ONCE, MICRO_BATCH_TOKENS
from lachesis_train.engine.losses import loss_metrics, loss_named, loss_settings
from lachesis_train.engine.model import LoraSpec, Model, token_logprobs

ADAM_DEFAULTS: Final = {
    "learning_rate": 1e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-12,
    "weight_decay": 0.0,
    "grad_clip_norm": 0.0,
}


@dataclass(frozen=True)
class TrainingDatum:
    """One sequence: tokens, int64 [T], and inputs of the loss, each [T]."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class ForwardBackward:
    """Logprobs of each datum's targets, float32 [T], in the order of the request, and metrics."""

    logprobs: Sequence[np.ndarray]
    metrics: Mapping[str, float]


@dataclass
class TrainingModel:
    """An adapter with its optimizer."""

    id: str
    spec: LoraSpec
    session: str
    optimizer: torch.optim.AdamW
    steps: int = 0

    @property
    def adapter(self) -> str:
        """The name of the adapter in the model. Names such as `train` are taken by torch."""
        return adapter_name(self.id)


def adapter_name(model_id: str) -> str:
    """Adapters are modules, whose names have no dots."""
    return "adapter_" + "".join(char if char.isalnum() else "_" for char in model_id)


def create_training_model(
    model: Model, model_id: str, spec: LoraSpec, session: str, seed: int | None = None
) -> TrainingModel:
    """A new adapter with a fresh optimizer."""
    name = adapter_name(model_id)
    model.add_adapter(name, spec, seed)
    parameters = list(model.parameters(name).values())
    optimizer = torch.optim.AdamW(parameters, lr=0.0, fused=True)
    return TrainingModel(model_id, spec, session, optimizer)


def forward_backward(
    model: Model,
    trained: TrainingModel,
    data: Sequence[TrainingDatum],
    loss_fn: str,
    config: Mapping[str, float],
    *,
    forward_only: bool,
) -> ForwardBackward:
    """Add the gradients of the batch's loss to those that the adapter has. If it raises, they are as before."""
    loss, settings = loss_named(loss_fn), loss_settings(loss_fn, config)
    _check(model, data, loss_fn, [] if forward_only else loss.inputs)
    scored = all(name in datum.inputs for datum in data for name in loss.inputs)
    parameters = list(model.parameters(trained.adapter).values())
    before = [None if p.grad is None else p.grad.clone() for p in parameters]
    model.use(trained.adapter)
    logprobs: list[np.ndarray] = [np.empty(0, np.float32)] * len(data)
    metrics: dict[str, float] = {"loss:sum": 0.0} if scored else {}
    trains = scored and not forward_only
    try:
        for places, shared in _micro_batches(data, loss.weight if trains else None, _micro_batch_tokens(model)):
            part = [data[place] for place in places]
            flat = _flat_inputs(model, part, loss.inputs if scored else ())
            found = _logprobs(model, part, shared, flat["target_tokens"], flat[loss.weight] if trains else None)
            values = found.detach()
            if scored:
                lost = loss.compute(found, flat, settings).sum()
                value = float(lost.detach())
                if not math.isfinite(value):
                    raise RequestError(f"the loss is {value}: inputs or weights are not finite")
                _add(metrics, {"loss:sum": value, **loss_metrics(loss_fn, values, flat, settings)})
                if not forward_only and lost.requires_grad:
                    lost.backward()
            sizes = [len(datum.tokens) for datum in part]
            for place, one in zip(places, values.cpu().split(sizes), strict=True):
                logprobs[place] = one.numpy()
    except BaseException:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        raise
    finally:
        _give_back()
    return ForwardBackward(logprobs, metrics)


def _give_back() -> None:
    """Give the memory of activations back to the system: glibc keeps 2 GB of it after a batch of SmolLM2."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def optim_step(model: Model, trained: TrainingModel, given: Mapping[str, Any]) -> dict[str, float]:
    """One step of Adam with decoupled weight decay; the metrics. The gradients are gone afterwards, also if it raises.

    Raises RequestError without gradients, with gradients that are not finite, and for settings that make no sense.
    """
    for key in given:
        if key not in ADAM_DEFAULTS and key != "type":
            raise RequestError(f"adam_params key {key!r} is unknown; there are {', '.join(ADAM_DEFAULTS)}")
    adam = {key: float(given.get(key, default)) for key, default in ADAM_DEFAULTS.items()}
    if not all(map(math.isfinite, adam.values())) or adam["learning_rate"] < 0 or adam["eps"] < 0:
        raise RequestError(f"adam_params {adam} are not finite numbers with learning_rate and eps of at least 0")
    if not (0 <= adam["beta1"] < 1 and 0 <= adam["beta2"] < 1):
        raise RequestError(f"beta1 {adam['beta1']} and beta2 {adam['beta2']} must be at least 0 and below 1")
    parameters = list(model.parameters(trained.adapter).values())
    if all(parameter.grad is None for parameter in parameters):
        raise RequestError(
            "there are no gradients: call forward_backward since the last optim_step, with trained tokens"
        )
    limit = adam["grad_clip_norm"] if adam["grad_clip_norm"] > 0 else math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    if not math.isfinite(norm):
        trained.optimizer.zero_grad()
        raise RequestError(f"the norm of the gradients is {norm}: the step is refused, the weights are as before")
    for group in trained.optimizer.param_groups:
        group.update(
            lr=adam["learning_rate"],
            betas=(adam["beta1"], adam["beta2"]),
            eps=adam["eps"],
            weight_decay=adam["weight_decay"],
        )
    trained.optimizer.step()
    trained.optimizer.zero_grad()
    trained.steps += 1
    return {
        "grad_norm": norm,
        "clipped": float(norm > limit),
        "learning_rate": adam["learning_rate"],
        "step": float(trained.steps),
    }


def _check(model: Model, data: Sequence[TrainingDatum], loss_fn: str, needed: Sequence[str]) -> None:
    if not data:
        raise RequestError("the batch has no data")
    for place, datum in enumerate(data):
        length = len(datum.tokens)
        if not 1 <= length <= model.context_length:
            raise RequestError(
                f"datum {place} has {length} tokens, and the context of the model is {model.context_length}; "
                "shorten it, or leave it out"
            )
        for name in ("target_tokens", *needed):
            if name not in datum.inputs:
                raise RequestError(f"datum {place} has no {name!r} in loss_fn_inputs, which loss {loss_fn!r} needs")
        for name, values in datum.inputs.items():
            if values.shape != (length,):
                raise RequestError(
                    f"datum {place}: {name!r} has the shape {list(values.shape)}, its model_input {length} tokens; "
                    "the embedded engine takes one value for each token"
                )
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                raise RequestError(f"datum {place}: {name!r} has values that are not finite")
        for name in ("tokens", "target_tokens"):
            ids = datum.tokens if name == "tokens" else datum.inputs[name]
            if ids.min() < 0 or ids.max() >= model.vocab_size:
                raise RequestError(
                    f"datum {place}: {name} has ids from {ids.min()} to {ids.max()}, the model has 0 to "
                    f"{model.vocab_size - 1}"
                )


def _micro_batch_tokens(model: Model) -> int:
    """Tokens of one forward pass."""
    if model.device.type != "cuda":
        return MICRO_BATCH_TOKENS
    config = model.network.config.get_text_config()
    values = config.num_hidden_layers * (15 * config.hidden_size + 6 * config.intermediate_size)  # kept of a token
    room = ACTIVATIONS_OF_A_GPU * torch.cuda.get_device_properties(model.device).total_memory
    return max(MICRO_BATCH_TOKENS, int(room / (values * model.network.dtype.itemsize)))


def _micro_batches(data: Sequence[TrainingDatum], weight: str | None, limit: int) -> Iterator[tuple[list[int], int]]:
    """Indices of sequences that go through the model together, and the number of tokens of their common beginning.

    Families, as the rollouts of a group, come first; of the others those of similar lengths, so that little is padded.
    On a GPU, where passes cost more than tokens, a family that fits into a part without sharing goes with the others.
    Sequences above `MICRO_BATCH_TOKENS` go alone: float32 attention there holds the square of their length.
    """
    alone = []
    for family, shared in _families(data, weight):
        longest = max(len(data[place].tokens) for place in family)
        if limit > MICRO_BATCH_TOKENS >= longest and longest * len(family) <= limit:
            alone += family
            continue
        own = longest - shared
        count = max(1, (limit - shared) // own)
        for at in range(0, len(family), count):
            part = family[at : at + count]
            if len(part) == 1:
                alone += part
            else:
                yield part, shared
    batch: list[int] = []
    for place in sorted(alone, key=lambda place: len(data[place].tokens), reverse=True):
        length = len(data[place].tokens)
        longest = len(data[batch[0]].tokens) if batch else length
        full = longest * (len(batch) + 1) > limit or longest > MICRO_BATCH_TOKENS
        if batch and (full or length < longest // 2):
            yield batch, 0
            batch = []
        batch.append(place)
    if batch:
        yield batch, 0


def _families(data: Sequence[TrainingDatum], weight: str | None) -> Iterator[tuple[list[int], int]]:
    """Indices of sequences with a common beginning of at least half of each, and its length.

    Nothing in the beginning has a weight other than 0, and each sequence has at least one token after it.
    """
    family: list[int] = []
    shared = longest = 0
    for place in sorted(range(len(data)), key=lambda place: data[place].tokens.tolist()):
        datum = data[place]
        length = len(datum.tokens)
        before = length - 1
        if weight and (trained := np.flatnonzero(datum.inputs[weight])).size:
            before = int(trained[0])
        common = min(before, shared, _common(data[family[0]], datum)) if family else before
        if family and 2 * common < max(longest, length):
            yield family, shared
            family, longest, common = [], 0, before
        family.append(place)
        shared, longest = common, max(longest, length)
    yield family, shared


def _common(one: TrainingDatum, other: TrainingDatum) -> int:
    """The number of tokens with which both begin, and which have the same targets."""
    length = min(len(one.tokens), len(other.tokens))
    differ = one.tokens[:length] != other.tokens[:length]
    differ |= one.inputs["target_tokens"][:length] != other.inputs["target_tokens"][:length]
    return int(differ.argmax()) if differ.any() else length


def _flat_inputs(model: Model, part: Sequence[TrainingDatum], names: Sequence[str]) -> dict[str, torch.Tensor]:
    def flat(name: str, kind: Any) -> torch.Tensor:
        joined = np.concatenate([datum.inputs[name] for datum in part])
        return torch.from_numpy(joined.astype(kind)).to(model.device)

    sizes = torch.tensor([len(datum.tokens) for datum in part])
    sequences = torch.arange(len(part)).repeat_interleave(sizes).to(model.device)
    fixed = {"target_tokens": flat("target_tokens", np.int64), "sequences": sequences}
    return {**fixed, **{name: flat(name, np.float32) for name in names}}


def _logprobs(
    model: Model, part: Sequence[TrainingDatum], shared: int, targets: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Logprobs of all targets, flat, of sequences of which the first `shared` tokens and targets are the same.

    Only those with a weight other than 0 have a gradient, and none of the shared has one; weights None: none has.
    """
    sizes = [len(datum.tokens) for datum in part]
    ids = np.full((len(part), max(sizes) - shared), model.pad_id, np.int64)
    real = np.zeros(ids.shape, bool)
    for row, datum in enumerate(part):
        ids[row, : sizes[row] - shared] = datum.tokens[shared:]
        real[row, : sizes[row] - shared] = True
    rows, places = torch.from_numpy(ids).to(model.device), torch.from_numpy(real).to(model.device)
    with torch.set_grad_enabled(weights is not None and bool((weights != 0).any())):
        if not shared:
            # Padding is on the right, where causal attention does not look: no mask, and the fast path of attention.
            return _scored(model, model.hidden(rows)[places], targets, weights)
        # What all begin with goes through the model once. Its keys and values are those of each row, and gradients
        # of all rows flow back through them.
        cache = DynamicCache()
        beginning = torch.from_numpy(part[0].tokens[None, :shared].astype(np.int64)).to(model.device)
        first = model.hidden(beginning, past_key_values=cache, use_cache=True)[0]
        for layer in cache.layers:
            layer.keys = layer.keys.expand(len(part), -1, -1, -1)
            layer.values = layer.values.expand(len(part), -1, -1, -1)
        hidden = model.hidden(rows, past_key_values=cache, use_cache=True)[places]
    known = _head(model, first.detach(), targets[:shared], grad=False)
    own = [size - shared for size in sizes]

    def without_beginning(flat: torch.Tensor) -> torch.Tensor:
        return torch.cat([values[shared:] for values in flat.split(sizes)])

    scored = _scored(model, hidden, without_beginning(targets), None if weights is None else without_beginning(weights))
    return torch.cat([each for values in scored.split(own) for each in (known, values)])


def _scored(model: Model, hidden: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    if weights is None:
        return _head(model, hidden.detach(), targets, grad=False)
    chosen = weights != 0
    masked = _head(model, hidden.detach()[~chosen], targets[~chosen], grad=False)
    result = masked.new_zeros(len(targets)).masked_scatter(~chosen, masked)
    if not bool(chosen.any()):
        return result
    return result.masked_scatter(chosen, _head(model, hidden[chosen], targets[chosen], grad=True))


def _head(model: Model, hidden: torch.Tensor, targets: torch.Tensor, *, grad: bool) -> torch.Tensor:
    def some(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return token_logprobs(model.logits(hidden), targets)

    size = max(1, LOGITS_AT_ONCE // model.vocab_size)
    with torch.set_grad_enabled(grad):
        if len(targets) <= size:
            return some(hidden, targets)
        parts = zip(hidden.split(size), targets.split(size), strict=True)
        return torch.cat([checkpoint(some, *one, use_reentrant=False) if grad else some(*one) for one in parts])


def _add(metrics: dict[str, float], new: Mapping[str, float]) -> None:
    for key, value in new.items():
        known = metrics.get(key, 0.0)
        metrics[key] = max(known, value) if key.endswith(":max") else known + value
