"""Sampling: the requests that wait go through the model as one batch, and new ones join it between two tokens.

A batch belongs to one version of the weights. Prompts are padded on the left, with right positions and a mask, so each
row gets the logits that it would get alone. Of a prompt that begins like a sequence which was sampled before, only the
rest goes through the model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers.cache_utils import Cache

from lachesis_train.engine.errors import RequestError
from lachesis_train.engine.key_values import new_cache
from lachesis_train.engine.limits import BATCH_TOKENS
from lachesis_train.engine.model import Model, token_logprobs, widened
from lachesis_train.engine.prefixes import KeptPrefixes, Prefix

PREFILL_TOKENS: Final = 8192
"""Tokens, padding included, of one forward pass over prompts, without what is known of them."""
POSITIONS_AT_ONCE: Final = 512
"""Positions whose logits are held at once for the logprobs of prompts."""
BLOCK: Final = 256
"""Tokens of the vocabulary whose probabilities are added up together."""


@dataclass(frozen=True)
class SamplingParameters:
    """How a request is sampled."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()


@dataclass
class SampledSequence:
    """One sampled sequence. `logprobs` are those of the model, before temperature, top_p and top_k."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    topk: list[tuple[list[int], list[float]]] = field(default_factory=list)
    stopped: bool = False
    """Ended by a stop token or text, not by its length."""


@dataclass
class SamplingTask:
    """A prompt with `count` samples; `done` is called once with the request, or with an error."""

    prompt: Sequence[int]
    count: int
    parameters: SamplingParameters
    done: Callable[[SamplingTask | Exception], None]
    topk: int = 0
    prompt_logprobs: int = 0
    """How many tokens at the end of the prompt get logprobs."""
    prompt_topk: int = 0
    cancelled: bool = False
    sequences: list[SampledSequence] = field(default_factory=list)
    found_prompt: list[float] = field(default_factory=list)
    """Logprobs of the last `prompt_logprobs` tokens."""
    found_prompt_topk: list[tuple[list[int], list[float]]] = field(default_factory=list)
    open: int = 0

    @property
    def scored(self) -> int:
        """Tokens at the end of the prompt that get logprobs: its first one has none."""
        return min(self.prompt_logprobs, len(self.prompt) - 1)

    @property
    def rows_length(self) -> int:
        """The longest that a row of the request may become."""
        return len(self.prompt) + self.parameters.max_tokens


def check_request(model: Model, request: SamplingTask) -> None:
    """Raises RequestError for what cannot be sampled."""
    length, parameters = len(request.prompt), request.parameters
    if not length:
        raise RequestError("the prompt is empty")
    if min(request.prompt) < 0 or max(request.prompt) >= model.vocab_size:
        raise RequestError(
            f"the prompt has ids from {min(request.prompt)} to {max(request.prompt)}, the model has 0 to "
            f"{model.vocab_size - 1}"
        )
    # The last token that is sampled is not put in, so a full prompt still yields one token.
    if request.rows_length > model.context_length + 1 or length > model.context_length:
        raise RequestError(
            f"{length} tokens of prompt and max_tokens {parameters.max_tokens} exceed the context of the model, "
            f"{model.context_length}; shorten the prompt or lower max_tokens"
        )
    if parameters.max_tokens < 1:
        raise RequestError(f"max_tokens is {parameters.max_tokens}, it must be at least 1")
    if not 1 <= request.count <= 4096:
        raise RequestError(f"num_samples is {request.count}, it must be between 1 and 4096")
    if not 0 <= parameters.temperature < float("inf"):
        raise RequestError(f"temperature is {parameters.temperature}, it must be a number of at least 0")
    if not 0 < parameters.top_p <= 1:
        raise RequestError(f"top_p is {parameters.top_p}, it must be above 0 and at most 1")
    if parameters.top_k < -1:
        raise RequestError(f"top_k is {parameters.top_k}, it must be at least 1, or 0 or -1 for no limit")
    if min(request.topk, request.prompt_topk, request.prompt_logprobs) < 0:
        raise RequestError("topk_sample_logprobs, topk_prompt_logprobs and prompt_logprobs_last_n must be at least 0")


@dataclass(frozen=True)
class _Prompt:
    """A prompt that goes through the model once, for all requests that have it: the rollouts of a group ask each by
    itself. `shared` tokens of it are known by a prefix."""

    requests: list[SamplingTask]
    prefix: Prefix | None
    shared: int

    @property
    def rest(self) -> Sequence[int]:
        return self.requests[0].prompt[self.shared :]


@dataclass
class _Row:
    request: SamplingTask
    sequence: SampledSequence
    random: random.Random


class SamplingBatch:
    """Rows that are sampled together from one version of the weights, which the caller has put in use."""

    def __init__(self, model: Model, version: str | None = None, prefixes: KeptPrefixes | None = None) -> None:
        self.model = model
        self.version = version
        self.prefixes = prefixes or KeptPrefixes(0)
        self.rows: list[_Row] = []
        self._cache: Any = None
        self._mask = torch.empty(0)
        self._tokens: list[int] = []
        self._positions = torch.empty(0)

    def room(self, requests: Sequence[SamplingTask]) -> bool:
        """Whether the requests fit in addition to the running rows. A single request always does."""
        rows = len(self.rows) + sum(request.count for request in requests)
        longest = max(request.rows_length for request in (*requests, *(row.request for row in self.rows)))
        return (not self.rows and len(requests) == 1) or rows * longest <= BATCH_TOKENS

    def add(self, requests: Sequence[SamplingTask]) -> None:
        """Put in the prompts of new requests, and sample their first tokens."""
        with torch.inference_mode():
            for part in _prefill_parts(self._prompts(requests)):
                self._prefill(part)

    def _prompts(self, requests: Sequence[SamplingTask]) -> list[_Prompt]:
        found: dict[tuple[tuple[int, ...], int], _Prompt] = {}
        for request in requests:
            prompt, scored = tuple(request.prompt), request.scored
            if (prompt, scored) not in found:
                # The logits after the last token, and before each that is scored, are still needed.
                prefix, shared = self.prefixes.find(self.version, prompt, len(prompt) - 1 - scored) or (None, 0)
                found[prompt, scored] = _Prompt([], prefix, shared)
            found[prompt, scored].requests.append(request)
        return list(found.values())

    def step(self) -> None:
        """Sample one token for each row."""
        with torch.inference_mode():
            self._step()

    def _step(self) -> None:
        cancelled = [place for place, row in enumerate(self.rows) if row.request.cancelled]
        if cancelled:
            self._keep([place for place in range(len(self.rows)) if place not in set(cancelled)])
        if not self.rows:
            return
        device = self.model.device
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], 1)
        self._positions += 1
        hidden = self.model.hidden(
            torch.tensor(self._tokens, device=device)[:, None],
            attention_mask=self._mask,
            position_ids=self._positions[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._choose(self.model.logits(hidden[:, -1]))

    def _prefill(self, prompts: Sequence[_Prompt]) -> None:
        device, width = self.model.device, max(len(prompt.rest) for prompt in prompts)
        ids = torch.full((len(prompts), width), self.model.pad_id, device=device)
        mask = torch.zeros_like(ids)
        for place, prompt in enumerate(prompts):
            ids[place, width - len(prompt.rest) :] = torch.tensor(prompt.rest, device=device)
            mask[place, width - len(prompt.rest) :] = 1
        cache, known = self._known(prompts)
        mask = torch.cat([known, mask], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        hidden = self.model.hidden(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
        )
        owners: list[int] = []
        new = SamplingBatch(self.model, self.version, self.prefixes)
        for place, prompt in enumerate(prompts):
            for request in prompt.requests:
                self._score_prompt(request, hidden[place, width - len(prompt.rest) :])
                request.sequences = [SampledSequence() for _ in range(request.count)]
                request.open = request.count
                owners += [place] * request.count
                for number, sequence in enumerate(request.sequences):
                    seed = request.parameters.seed
                    chance = random.Random(None if seed is None else f"{seed}/{number}")
                    new.rows.append(_Row(request, sequence, chance))
        index = torch.tensor(owners, device=device)
        new._cache, new._mask, new._positions = cache, mask[index], positions[index, -1]
        if owners != list(range(len(prompts))):
            cache.batch_select_indices(index)
        if known.shape[1]:
            new._close_gaps()
        new._tokens = [0] * len(owners)
        new._choose(self.model.logits(hidden[:, -1])[index])
        self._join(new)

    def _known(self, prompts: Sequence[_Prompt]) -> tuple[Cache, torch.Tensor]:
        """Keys and values of what is known of the prompts, padded on the left, and its mask, [prompts, longest]."""
        cache, device = new_cache(), self.model.device
        longest = max(prompt.shared for prompt in prompts)
        shared = torch.tensor([prompt.shared for prompt in prompts], device=device)
        mask = (torch.arange(longest, 0, -1, device=device) <= shared[:, None]).long()
        some = next((prompt.prefix for prompt in prompts if prompt.prefix), None)
        for layer, likes in enumerate(some.layers if some else ()):
            pair = [each.new_zeros(len(prompts), each.shape[0], longest, each.shape[2]) for each in likes]
            for place, prompt in enumerate(prompts):
                if prompt.prefix:
                    for whole, one in zip(pair, prompt.prefix.layers[layer], strict=True):
                        whole[place, :, longest - prompt.shared :] = one[:, : prompt.shared]
            cache.update(*pair, layer)
        return cache, mask

    def _close_gaps(self) -> None:
        """Put the padding between what was known and the rest before both."""
        width = int(self._mask.sum(1).max())
        order = self._mask.sort(dim=1, stable=True).indices[:, -width:]
        self._mask = self._mask.gather(1, order)
        rows = torch.arange(len(order), device=order.device)[:, None]
        for layer in self._cache.layers:
            layer.keys, layer.values = (
                each.transpose(1, 2)[rows, order].transpose(1, 2) for each in (layer.keys, layer.values)
            )

    def _score_prompt(self, request: SamplingTask, hidden: torch.Tensor) -> None:
        count = request.scored
        if not count:
            return
        targets = torch.tensor(list(request.prompt[-count:]), device=self.model.device)
        for where, target in zip(
            hidden[-count - 1 : -1].split(POSITIONS_AT_ONCE), targets.split(POSITIONS_AT_ONCE), strict=True
        ):
            logits = self.model.logits(where)
            request.found_prompt += token_logprobs(logits, target).tolist()
            if request.prompt_topk:
                request.found_prompt_topk += _topk(widened(logits).log_softmax(-1), request.prompt_topk)

    def _choose(self, logits: torch.Tensor) -> None:
        """Sample from [rows, vocabulary], and drop the rows that end."""
        logits = widened(logits)
        every = logits.log_softmax(-1)
        if bool(every[:, 0].isnan().any()):  # one logit that is not a number makes all of its row so
            raise RequestError("the logits are not numbers: the weights have diverged; use an earlier version")
        chosen = _sample(logits, every, self.rows)
        logprobs = every.gather(1, chosen[:, None])[:, 0].tolist()
        tokens = chosen.tolist()
        kept = []
        for place, row in enumerate(self.rows):
            row.sequence.tokens.append(tokens[place])
            row.sequence.logprobs.append(logprobs[place])
            if row.request.topk:
                row.sequence.topk += _topk(every[place : place + 1], row.request.topk)
            if self._ends(row):
                self._keep_prefix(place)
                row.request.open -= 1
                if not row.request.open:
                    row.request.done(row.request)
            else:
                kept.append(place)
        self._tokens = tokens
        if len(kept) < len(self.rows):
            self._keep(kept)

    def _keep_prefix(self, place: int) -> None:
        """For the next turn. The last token has no keys and values yet."""
        request, sequence = self.rows[place].request, self.rows[place].sequence
        tokens = [*request.prompt, *sequence.tokens[:-1]]
        if self.prefixes.limit and not request.scored:  # what is only scored has no next turn
            layers = [
                (each.keys[place, :, -len(tokens) :], each.values[place, :, -len(tokens) :])
                for each in self._cache.layers
            ]
            self.prefixes.keep(self.version, tokens, layers)

    def _ends(self, row: _Row) -> bool:
        parameters, tokens = row.request.parameters, row.sequence.tokens
        row.sequence.stopped = tokens[-1] in parameters.stop_ids or self._ends_in_text(parameters.stop_texts, tokens)
        return row.sequence.stopped or len(tokens) >= parameters.max_tokens

    def _ends_in_text(self, texts: Sequence[str], tokens: Sequence[int]) -> bool:
        if not texts:
            return False
        # A token is at least one byte, and a character at most four: the text is within the last so many tokens.
        reach = max(len(text.encode()) for text in texts) + 4
        end = self.model.tokenizer.decode(tokens[-reach:], skip_special_tokens=False)
        return any(text in end for text in texts)

    def _keep(self, places: Sequence[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        if not self.rows:
            self._cache = None
            return
        index = torch.tensor(places, device=self.model.device)
        self._tokens = [self._tokens[place] for place in places]
        self._positions, mask = self._positions[index], self._mask[index]
        unused = int(mask.shape[1] - mask.sum(1).max())  # columns at the left that are padding for all
        self._mask = mask[:, unused:]
        for layer in self._cache.layers:
            layer.keys = layer.keys[index, :, unused:]
            layer.values = layer.values[index, :, unused:]

    def _join(self, new: SamplingBatch) -> None:
        if not new.rows:
            return
        if not self.rows:
            self.rows, self._cache, self._mask = new.rows, new._cache, new._mask
            self._tokens, self._positions = new._tokens, new._positions
            return
        width = max(self._mask.shape[1], new._mask.shape[1])
        self._mask = torch.cat([_padded(self._mask, width, 1), _padded(new._mask, width, 1)])
        for ours, theirs in zip(self._cache.layers, new._cache.layers, strict=True):
            ours.keys = torch.cat([_padded(ours.keys, width, 2), _padded(theirs.keys, width, 2)])
            ours.values = torch.cat([_padded(ours.values, width, 2), _padded(theirs.values, width, 2)])
        self.rows += new.rows
        self._tokens += new._tokens
        self._positions = torch.cat([self._positions, new._positions])


def _padded(tensor: torch.Tensor, width: int, dimension: int) -> torch.Tensor:
    missing = width - tensor.shape[dimension]
    if not missing:
        return tensor
    shape = [*tensor.shape[:dimension], missing, *tensor.shape[dimension + 1 :]]
    return torch.cat([tensor.new_zeros(shape), tensor], dimension)


def _prefill_parts(prompts: Sequence[_Prompt]) -> list[list[_Prompt]]:
    """Prompts that go through the model together: similar lengths, a bounded number of tokens."""
    parts: list[list[_Prompt]] = []
    for prompt in sorted(prompts, key=lambda prompt: len(prompt.rest), reverse=True):
        longest = len(parts[-1][0].rest) if parts else 0
        if longest and len(prompt.rest) * 2 > longest and longest * (len(parts[-1]) + 1) <= PREFILL_TOKENS:
            parts[-1].append(prompt)
        else:
            parts.append([prompt])
    return parts


def _sample(logits: torch.Tensor, logprobs: torch.Tensor, rows: Sequence[_Row]) -> torch.Tensor:
    """One token for each row, [rows], by its own parameters and source of chance, so that no row depends on another."""
    parameters = [row.request.parameters for row in rows]
    if all(one.temperature == 0 for one in parameters):
        return logits.argmax(-1)
    if all(one.temperature == 1 for one in parameters):
        probabilities = logprobs.exp()
    else:
        temperatures = torch.tensor([one.temperature or 1.0 for one in parameters], device=logits.device)
        above = logits - logits.amax(-1, keepdim=True)  # at most 0, so a tiny temperature gives no infinity
        probabilities = (above / temperatures[:, None].clamp(min=1e-30)).softmax(-1)
    for place, one in enumerate(parameters):
        if one.temperature == 0:
            best = int(logits[place].argmax())
            probabilities[place] = 0
            probabilities[place, best] = 1
        elif one.top_k > 0 or one.top_p < 1:
            probabilities[place] = _truncated(probabilities[place], one)
    chance = torch.tensor([row.random.random() for row in rows], dtype=torch.float64, device=logits.device)
    return _inverse(probabilities, chance)


def _inverse(probabilities: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
    """The token, [rows], at which the cumulative probability, of [rows, vocabulary], exceeds `chance`, [rows], below 1.

    Sums of blocks come first: a cumulative sum over the whole vocabulary costs a tenth of a step.
    """
    missing = -probabilities.shape[1] % BLOCK
    blocks = torch.nn.functional.pad(probabilities, (0, missing)).unflatten(1, (-1, BLOCK))
    sums = blocks.sum(-1).double().cumsum(-1)
    wanted = chance * sums[:, -1]
    block = _first_above(sums, wanted)
    rows = torch.arange(len(wanted), device=wanted.device)
    before = torch.where(block > 0, sums[rows, (block - 1).clamp(min=0)], 0.0)
    inside = blocks[rows, block].double().cumsum(-1)
    # The sums of blocks are rounded otherwise: the last token with a probability is the limit.
    token = torch.minimum(_first_above(inside, wanted - before), _first_above(inside, inside[:, -1] * (1 - 1e-12)))
    return block * BLOCK + token


def _first_above(sums: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    found = torch.searchsorted(sums, wanted[:, None], right=True)[:, 0]
    return found.clamp(max=sums.shape[1] - 1)


def _truncated(probabilities: torch.Tensor, parameters: SamplingParameters) -> torch.Tensor:
    """Probabilities with 0 outside the top_k, and then the top_p, most likely tokens."""
    ordered, order = probabilities.sort(descending=True, stable=True)
    if parameters.top_k > 0:
        ordered[parameters.top_k :] = 0
    before = ordered.cumsum(0) - ordered
    ordered[before >= parameters.top_p * ordered.sum()] = 0
    return torch.zeros_like(probabilities).scatter(0, order, ordered)


def _topk(logprobs: torch.Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
