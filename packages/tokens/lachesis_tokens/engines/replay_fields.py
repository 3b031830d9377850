"""Reads routed experts and sampling masks from the answers of vLLM and SGLang."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from lachesis_client.client_settings import ServerSettings
from lachesis_client.errors import BadResponse
from lachesis_messages.replay import RoutedExperts, SamplingMask, join_experts, join_masks
from lachesis_tokens.engines.base import Generation
from lachesis_tokens.engines.prompt_ids import PromptIds


def with_replay(
    generation: Generation, prompt: PromptIds, settings: ServerSettings, *, experts: object, mask: object, hint: str
) -> Generation:
    """The completion with its experts and its mask, where the settings ask for them.

    Args:
        experts, mask: the fields of the answer.
        hint: what to do if one of them is missing.

    Raises:
        BadResponse: one of them is missing, or does not fit the tokens.
    """
    if not generation.ids:
        return generation
    try:
        found: dict[str, Any] = {}
        if settings.routed_experts:
            found["experts"] = _experts(experts, prompt, len(generation.ids))
        if settings.sampling_mask:
            found["sampling_mask"] = allowed = SamplingMask.of(mask)  # type: ignore[arg-type]
            if len(allowed) != len(generation.ids) or not allowed.covers(0, len(allowed)):
                raise ValueError(f"a sampling mask of {len(allowed)} tokens for {len(generation.ids)} sampled ones")
            if (place := allowed.missing(generation.ids)) is not None:
                raise ValueError(f"the sampling mask of sampled token {place} does not have the token itself")
    except ValueError as error:
        raise BadResponse(settings.base_url, str(error), hint) from error
    return replace(generation, **found) if found else generation


def cut_replay(generation: Generation, prompt_tokens: int) -> Generation:
    """The completion with the experts and the mask of the ids that it still has, after a caller dropped the last ones.

    Its experts are what `PromptIds.known_experts` takes for the request that goes on with it.
    """
    count, experts, mask = len(generation.ids), generation.experts, generation.sampling_mask
    if experts is not None:
        experts = experts.rows(experts.start, prompt_tokens + count - 1) if count else None
    return replace(generation, experts=experts, sampling_mask=None if mask is None else mask.first(count))


def joined_replay(begun: Generation, rest: Generation) -> dict[str, Any]:
    """`experts` and `sampling_mask` of an interrupted completion: `rest` was sampled after the ids of `begun`."""
    experts = [piece for piece in (begun.experts, rest.experts) if piece is not None]
    masks = [piece for piece in (begun.sampling_mask, rest.sampling_mask) if piece is not None]
    return {
        "experts": join_experts(experts) if experts else None,
        "sampling_mask": join_masks(masks) if masks else None,
    }


def _experts(wire: object, prompt: PromptIds, sampled: int) -> RoutedExperts:
    """vLLM's `.npy` or SGLang's int32. A server that is too old to begin at `experts_start` sends all rows."""
    if not isinstance(wire, str):
        raise ValueError(f"the completion came without routed experts ({type(wire).__name__})")
    start, total, known = prompt.experts_start, prompt.there.length + sampled - 1, prompt.known_experts
    if wire.startswith(_NPY):
        found = RoutedExperts.from_npy(wire, 0)
    else:
        row = math.prod(known.row) if known is not None else _row(wire, total)
        found = RoutedExperts.from_int32(wire, 0, row)
    if found.end == total - start:
        found = replace(found, start=start)
    if found.end != total:
        raise ValueError(f"routed experts of {found.end} tokens, but {total - start} are new, of {total}")
    if known is not None and known.row != found.row:
        raise ValueError(f"routed experts of {found.row} for each token, and of {known.row} earlier in the rollout")
    return found.rows(start, total)


def _row(wire: str, total: int) -> int:
    """SGLang does not say the shape: ids of each of `total` tokens."""
    size = len(wire) // 4 * 3 - wire[-2:].count("=")
    if size % (4 * total):
        raise ValueError(f"{size} bytes of routed experts are not rows for {total} tokens")
    return size // (4 * total)


_NPY: Final = "k05VTVBZ"
"""Base64 of the first bytes of a `.npy` file."""


def sampled_logprobs(meta: Mapping[str, Any], entries: list[Any]) -> list[Any]:
    """SGLang's logprobs over the ids of the sampling mask, in place of those over all ids."""
    listed = meta.get("output_token_sampling_logprobs")
    return listed if isinstance(listed, list) and len(listed) == len(entries) else []
