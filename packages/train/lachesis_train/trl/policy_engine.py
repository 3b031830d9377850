"""A token engine over the model of a trainer in the same process.

Rollouts ask for completions on their event loop. The thread of the trainer, which waits for the rollouts anyway,
samples for them (`TrlPolicyEngine.serve`): the model is used in one thread only, and never while it is trained.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from transformers import DynamicCache

from lachesis_client.errors import RequestRejected
from lachesis_client.sampling import LogprobsKind
from lachesis_messages.messages import FinishReason
from lachesis_messages.tokens import PromptChecked
from lachesis_train.trainers.sampler_engine import TokenRoom, TrainerCompletion, TrainerSamplerEngine

URL: Final = "trl://trainer.model"
_BATCH: Final = 64
"""Completions that are sampled at once, at most."""
_SETTLE: Final = 0.005
"""Seconds without a further request after which a batch begins."""


@dataclass(slots=True)
class _Row:
    """One completion that is being sampled."""

    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    done: Future[FinishReason] = field(default_factory=Future)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def end(self, reason: FinishReason) -> None:
        """Hand it to the rollout, if that still waits."""
        try:
            self.done.set_result(reason)
        except InvalidStateError:  # cancelled
            return


class TrlPolicyEngine(TrainerSamplerEngine):
    """The model of a trainer as its sampler. Requests wait until `serve` runs."""

    kind: ClassVar[str] = "trl"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("temperature",)
    prompt_checked: PromptChecked = "ids"  # the very ids are the input of the model

    def __init__(self, tokenizer: Any) -> None:
        room = TokenRoom(URL, "max_completion_length")
        super().__init__(self._wait, tokenizer=tokenizer, url=URL, logprobs="temperature", room=room, time_limit=None)
        self.version = ""
        """The weights that `serve` samples from."""
        self._waiting: queue.SimpleQueue[_Row | None] = queue.SimpleQueue()

    async def _wait(self, prompt_ids: list[int], session: str, most: int, temperature: float) -> TrainerCompletion:
        if temperature <= 0:
            raise RequestRejected(
                URL,
                400,
                f"temperature {temperature:g} does not sample",
                "leave it out of the settings: the trainer's model is sampled as it is trained",
            )
        row = _Row(prompt_ids, most, temperature)
        self._waiting.put(row)
        reason = await asyncio.wrap_future(row.done)
        return TrainerCompletion(row.ids, row.logprobs, reason.value, [self.version])

    # The thread of the trainer.

    def serve(self, model: Any, until: Future[Any]) -> None:
        """Sample what is asked for, until `until` is done. `model` is in evaluation mode."""
        until.add_done_callback(lambda _: self._waiting.put(None))
        try:
            while not until.done():
                if rows := self._next_batch():
                    with torch.no_grad():
                        self._sample_rows(model, rows)
        finally:
            self.room.forget()

    def _next_batch(self) -> list[_Row]:
        """The requests that wait, once no further one arrives; none when the rollouts are over."""
        rows: list[_Row] = []
        try:
            while len(rows) < _BATCH:
                row = self._waiting.get(timeout=_SETTLE if rows else None)
                if row is None:
                    break
                if not row.done.cancelled():
                    rows.append(row)
        except queue.Empty:
            pass
        return rows

    def _sample_rows(self, model: Any, rows: list[_Row]) -> None:
        """Sample one batch to its end. A completion is handed over as soon as it ends."""
        device = next(model.parameters()).device
        prompts = list({tuple(row.prompt): None for row in rows})  # rollouts of a group begin with the same one
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        cache = DynamicCache(config=model.config)
        place = {prompt: at for at, prompt in enumerate(prompts)}
        of_rows = torch.tensor([place[tuple(row.prompt)] for row in rows], device=device)
        shared = True
        while rows:
            logits = model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
            if shared:
                cache.batch_select_indices(of_rows)
                logits, mask, positions, shared = logits[of_rows], mask[of_rows], positions[of_rows], False
            temperatures = torch.tensor([[row.temperature] for row in rows], device=device)
            logprobs = (logits.float() / temperatures).log_softmax(-1)
            sampled = torch.multinomial(logprobs.exp(), 1)
            given = logprobs.gather(-1, sampled)[:, 0].tolist()
            left = []
            for at, (row, token, logprob) in enumerate(zip(rows, sampled[:, 0].tolist(), given, strict=True)):
                row.ids.append(token)
                row.logprobs.append(min(logprob, 0.0))
                if token in self.ends:
                    row.end(FinishReason.STOP)
                elif len(row.ids) >= row.max_tokens:
                    row.end(FinishReason.LENGTH)
                elif not row.done.cancelled():
                    left.append(at)
            if len(left) < len(rows):
                rows, kept = [rows[at] for at in left], torch.tensor(left, dtype=torch.long, device=device)
                if rows:
                    cache.batch_select_indices(kept)
                sampled, mask, positions = sampled[kept], mask[kept], positions[kept]
            ids, positions = sampled, positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=-1)
