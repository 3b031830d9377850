"""SGLang's native `/generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from lachesis_client.errors import BadResponse
from lachesis_client.http_client import ARRAY
from lachesis_client.sampling import LogprobsKind, Sampling
from lachesis_tokens.engines.base import REPLAY, Generation
from lachesis_tokens.engines.http_engine import (
    SingleRequestEngine,
    ids_or_none,
    list_of_objects,
    text_or_none,
    tokenized,
)
from lachesis_tokens.engines.prompt_ids import PromptIds
from lachesis_tokens.engines.replay_fields import sampled_logprobs, with_replay

_OF_THE_REQUEST: Final = frozenset(
    (
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "custom_logit_processor", "data_parallel_rank"),
        *("extra_key", "lora_id", "lora_path", "priority", "rid", "routing_key", "session_params"),
    )
)
"""Extra fields outside `sampling_params`. All others go into `sampling_params`."""
_REPLAY_FLAGS: Final = (
    "start SGLang with --enable-return-routed-experts (openai.routed_experts), use a version with return_sampling_mask "
    "and set top_k (openai.sampling_mask), or leave the setting out"
)


class SGLangEngine(SingleRequestEngine):
    """SGLang, through `/generate` with `input_ids` and `return_logprob`.

    Its logprobs are of the logits divided by the temperature, before top-k, top-p and min-p. With
    SGLANG_RETURN_ORIGINAL_LOGPROB=1 the server omits the temperature (`logprobs_mode` raw). It uses a seed only with
    `--enable-deterministic-inference`.
    """

    kind: ClassVar[str] = "sglang"
    replays: ClassVar[frozenset[str]] = frozenset(REPLAY)
    session_header: ClassVar[str] = "X-SMG-Routing-Key"
    modes: ClassVar[tuple[LogprobsKind, ...]] = ("temperature", "raw")
    takes_images: ClassVar[bool] = True

    @property
    def url(self) -> str:
        """Outside `/v1`."""
        return f"{self.root_url}/generate"

    @property
    def logprobs(self) -> LogprobsKind:
        """With a sampling mask the server also reports the logprobs over the ids in it."""
        return "processed" if self.settings.sampling_mask else super().logprobs

    def finish_reasons(self, body: Mapping[str, Any]) -> Sequence[str]:
        """`meta_info.finish_reason`, with its message."""
        reasons = map(_finish_reason, _items(body) or ())
        return [": ".join(map(str, filter(None, (each.get("type"), each.get("message"))))) for each in reasons]

    async def tokenize(self, text: str) -> list[int] | None:
        """See `ServerTokenizer`. Before it had `/tokenize`, by the echo of a completion of the text."""
        asked = {"model": self.settings.model_name, "prompt": text, "add_special_tokens": False}
        if (ids := await tokenized(self, asked)) is not None:
            return ids
        payload = {"text": text, "sampling_params": {"max_new_tokens": 1}, "return_prompt_token_ids": True}
        items = _items((await self.send(self.url, payload, max_retries=1)).body)
        return ids_or_none(items[0].get("prompt_token_ids")) if items else None

    def payload(self, prompt: PromptIds, sampling: Sampling, n: int) -> dict[str, Any]:
        """Ids and `sampling_params`."""
        params = {**sampling.parameters(), "n": n, "top_k": sampling.top_k or -1}
        params["max_new_tokens"] = params.pop("max_tokens")
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        params |= {"skip_special_tokens": False, "no_stop_trim": True}
        extra = self.extra(sampling)
        beside = {key: extra.pop(key) for key in _OF_THE_REQUEST & extra.keys()}
        if prompt.route is not None and prompt.route.rank is not None:
            beside.setdefault("data_parallel_rank", prompt.route.rank)  # this route ignores the header
        if self.settings.routed_experts:
            beside |= {"return_routed_experts": True, "routed_experts_start_len": prompt.experts_start}
        if self.settings.sampling_mask:
            beside["return_sampling_mask"] = True
        return {
            **beside,
            "input_ids": prompt.sent,
            **({"image_data": [placed.image.url for placed in prompt.images]} if prompt.images else {}),
            "sampling_params": {**extra, **params},
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "return_text_in_logprobs": False,
            "return_prompt_token_ids": self.echoes(prompt),
            "stream": False,
        }

    def read(self, body: Mapping[str, Any], prompt: PromptIds) -> list[Generation]:
        """`meta_info.output_token_logprobs`: logprob, id and text of every token."""
        items = _items(body)
        if items is None:
            raise BadResponse(self.base_url, f"the answer has no meta_info (its keys: {', '.join(map(str, body))})")
        for item in items:
            if not _never_begun(item):  # what is aborted in the queue has neither tokens nor the length of a prompt
                length = item["meta_info"].get("prompt_tokens")
                self.check_prompt(prompt, item.get("prompt_token_ids"), length if isinstance(length, int) else None)
        return [
            with_replay(
                self._generation(item),
                prompt,
                self.settings,
                experts=item["meta_info"].get("routed_experts"),
                mask=item["meta_info"].get("output_token_sampling_mask"),
                hint=_REPLAY_FLAGS,
            )
            for item in items
        ]

    def _generation(self, item: Mapping[str, Any]) -> Generation:
        meta = item["meta_info"]
        entries = [] if _never_begun(item) else meta.get("output_token_logprobs")
        if not isinstance(entries, list) or not all(isinstance(entry, list) and len(entry) > 1 for entry in entries):
            raise BadResponse(
                self.base_url,
                "the completion came without output_token_logprobs",
                "serve with SGLang 0.4 or later, whose /generate supports return_logprob",
            )
        counted = meta.get("completion_tokens")
        if isinstance(counted, int) and counted != len(entries):
            raise BadResponse(
                self.base_url,
                f"the server counts {counted} completion tokens, but lists {len(entries)}",
                "serve without speculative decoding, or with a later SGLang",
            )
        ids, logprobs = [entry[1] for entry in entries], [entry[0] for entry in entries]
        if self.settings.sampling_mask:
            logprobs = sampled_logprobs(meta, entries)
        listed = item.get("output_ids")
        # In SGLang 0.5 and before, output_ids begin with the end of the prompt.
        if isinstance(listed, list) and listed[len(listed) - len(ids) :] != ids:
            raise BadResponse(
                self.base_url,
                "output_ids and the ids in output_token_logprobs differ",
                "serve without speculative decoding, or with a later SGLang",
            )
        cached = meta.get("cached_tokens")
        return self.generation(
            ids,
            logprobs,
            _finish_reason(item).get("type"),
            # Before 2026-08 there is one version only, that of the end of the completion.
            model_version=text_or_none(meta.get("weight_version")),
            versions=meta.get("weight_versions"),
            completion_id=meta.get("id"),
            cached_tokens=cached if isinstance(cached, int) else None,
        )


def _items(body: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The completions: an array, or a single object."""
    items = list_of_objects(body.get(ARRAY, [body]))
    return items if items and all(isinstance(item.get("meta_info"), Mapping) for item in items) else None


def _never_begun(item: Mapping[str, Any]) -> bool:
    return _finish_reason(item).get("type") == "abort" and not item["meta_info"].get("output_token_logprobs")


def _finish_reason(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """`{"type": ..., "matched": ...}`; a bare string in older versions."""
    reason = item["meta_info"].get("finish_reason")
    return reason if isinstance(reason, Mapping) else {"type": reason}
