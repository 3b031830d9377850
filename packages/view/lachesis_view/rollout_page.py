"""The page of a rollout, built from the record of its group: what all pages show of one, and its samples."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from lachesis_messages.records.groups import has_other_branches, rollout_samples, stored_messages
from lachesis_tokens.samples.advantages import rollout_advantages
from lachesis_view.html import pretty
from lachesis_view.html.rollout import inherited_turns, rollout_view, title_of, tool_views
from lachesis_view.html.times import time_view
from lachesis_view.token_text import TokenTexts
from lachesis_view.trees import tree_parts

_FACTS = ("finish_reason", "model", "model_version", "prompt_checked", "purpose", "interrupts", "sampling")


def rollout_context(group: Mapping[str, Any], n: int, again: str = "") -> dict[str, Any]:
    """The values for the template of rollout `n`; `again` is the command that plays it again, if anything does.

    Raises IndexError if the group has no rollout of this number.
    """
    rollouts = group["rollouts"]
    if not 0 <= n < len(rollouts):
        raise IndexError(f"rollout {n}: the group has {len(rollouts)}")
    samples = rollout_samples(group, rollouts[n])
    shown = rollout_view(group, rollouts[n])
    parts = [part for part in tree_parts(group).values() if n in part.leaves]
    spans = {span["turn"]: (sample, span) for sample in samples for span in sample["spans"]}
    for branch in shown["branches"]:
        for message in branch["messages"]:
            if message["turn"] in spans:
                sample, span = spans[message["turn"]]
                message["span"] = {**_span_facts(sample, span), "sample": sample["index"]}
    turns = [message for message in shown["branches"][0]["messages"] if message["role"] == "assistant"]
    if again and not has_other_branches(rollouts[n]):  # what was edited away is not played again
        for played, message in enumerate(turns):
            message["step_in"] = f"{again} --at {played} --as agent"
    return {
        "group": {name: group.get(name) for name in ("environment", "item_key", "model", "evaluation")},
        "title": title_of(group.get("item"), stored_messages(group, rollouts[n])),
        "item": pretty(group.get("item")),
        "rollout": rollouts[n],
        "shown": shown,
        "times": time_view(rollouts[n], shown["branches"]),
        "again": again,
        "n": n,
        "count": len(rollouts),
        "advantage": advantages(group)[n],
        "baseline": parts[-1].baseline if parts else _baseline(group),
        "parts": parts,
        "samples": [_sample_view(sample, rollouts[n]) for sample in samples],
        "tools": tool_views(group),
    }


def advantages(group: Mapping[str, Any]) -> list[float | None]:
    """Of each rollout: what its trainer gave it; where none is recorded, that of its last part in a tree, or its reward
    minus the mean of the group."""
    if all("advantage" in rollout for rollout in group["rollouts"]):
        return [rollout["advantage"] for rollout in group["rollouts"]]
    if parts := tree_parts(group):
        return [parts[rollout["tree"]["path"]].advantage for rollout in group["rollouts"]]
    return rollout_advantages([rollout["reward"] for rollout in group["rollouts"]])


def _baseline(group: Mapping[str, Any]) -> float | None:
    rewards = [rollout["reward"] for rollout in group["rollouts"] if rollout["reward"] is not None]
    return sum(rewards) / len(rewards) if rewards else None


def _sample_view(sample: Mapping[str, Any], rollout: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{name: sample[name] for name in ("index", "count", "weight", "discarded", "outcome")},
        "skipped": training_of(sample).get("skipped"),
        "length": len(sample["tokens"]),
        "trained": sum(span["end"] - span["start"] for span in sample["spans"]),
        "turns": [span["turn"] + inherited_turns(rollout) for span in sample["spans"]],
    }


def _span_facts(sample: Mapping[str, Any], span: Mapping[str, Any]) -> dict[str, Any]:
    logprobs = sample["logprobs"][span["start"] : span["end"]]
    return {
        **{name: span.get(name) for name in _FACTS},
        "turn": span["turn"],
        "start": span["start"],
        "end": span["end"],
        "versions": span.get("versions") or [],
        "mean_logprob": sum(logprobs) / len(logprobs),
    }


def sample_tokens(group: Mapping[str, Any], n: int, number: int, vocabulary: TokenTexts | None) -> dict[str, Any]:
    """The tokens of one sample of rollout `n`, ready for JSON; all lists are as long as the sample.

    `segments` cut it into context and completions; `trained_in` is the number of the sample that trains a completion.
    Logprobs are null in context. `texts` are null without a vocabulary; a token that is not text has its bytes in
    `bytes`, and `runs` says which text several of these are. Raises IndexError.
    """
    samples = rollout_samples(group, group["rollouts"][n])
    if not 0 <= number < len(samples):
        raise IndexError(f"sample {number}: the rollout has {len(samples)}")
    sample = samples[number]
    ids: list[int] = sample["tokens"]
    logprobs: list[float | None] = [None] * len(ids)
    versions: list[tuple[str, int, int]] = []
    segments: list[dict[str, Any]] = []
    for other, span in _sampled_in(ids, sample, samples):
        start, end = span["start"], span["end"]
        logprobs[start:end] = [round(each, 4) for each in other["logprobs"][start:end]]
        versions += [(name, start + low, start + high) for name, low, high in span.get("versions") or ()]
        segments.append({"kind": "sampled", "trained_in": other["index"], **_span_facts(other, span)})
    ends = [0, *(place for each in segments for place in (each["start"], each["end"])), len(ids)]
    if ends != sorted(ends) or len(logprobs) != len(ids):
        raise ValueError("the completions are not in the order of the tokens, or without some of their logprobs")
    gaps = [(start, end) for start, end in list(pairwise(ends))[::2] if end > start]
    segments += [{"kind": "context", "start": start, "end": end} for start, end in gaps]
    texts, runs = vocabulary.texts(ids) if vocabulary is not None else (None, [])
    rollout = group["rollouts"][n]
    own = [part for part in tree_parts(group).values() if part.rollout == n]
    of_parts = {completion: part.advantage for part in own for completion in part.completions}
    for each in segments:
        if each["kind"] == "sampled":
            each |= {"label": each["turn"] + inherited_turns(rollout), "advantage": of_parts.get(each["turn"])}
    return {
        **_sample_view(sample, rollout),
        "ids": ids,
        "texts": texts,
        "bytes": {
            at: (vocabulary.piece(ids[at]) or b"").hex(" ") for at, text in enumerate(texts or ()) if text is None
        }
        if vocabulary
        else {},
        "runs": runs,
        "special": sorted({*sample["end_of_turn"], *(vocabulary.special if vocabulary else ())} & set(ids)),
        "tokenizer": vocabulary and vocabulary.name,
        "doubtful": _doubtful(vocabulary, ids, segments, stored_messages(group, rollout), rollout),
        "logprobs": logprobs,
        "versions": versions,
        "choices": _choices(sample),
        "segments": sorted(segments, key=lambda each: each["start"]),
        **_advantage(group, n, sample),
        "trainer_logprobs": _trainer_logprobs(sample),
        "staleness": training_of(sample).get("staleness"),
        "turn_rewards": _turn_rewards(rollout),
    }


def training_of(sample: Mapping[str, Any]) -> Mapping[str, Any]:
    """A trainer's notes on a sample; empty if it belongs to another file."""
    found: Mapping[str, Any] = sample.get("training") or {}
    return found


def _advantage(group: Mapping[str, Any], n: int, sample: Mapping[str, Any]) -> dict[str, float | None]:
    """Of the tokens of a sample, and the largest one in the group."""
    given = [training["advantage"] for each in group["samples"] if (training := training_of(each))]
    of_parts = [part.advantage for part in tree_parts(group).values()]
    known = [abs(each) for each in given or of_parts or advantages(group) if each is not None]
    own = training_of(sample)
    advantage = None if own.get("skipped") else own["advantage"] if own else advantages(group)[n]
    return {"advantage": advantage, "largest_advantage": max(known, default=0.0)}


def _trainer_logprobs(sample: Mapping[str, Any]) -> list[float | None] | None:
    """As long as the sample; null where it trains nothing."""
    found: list[float] = training_of(sample).get("trainer_logprobs") or []
    places = [at for span in sample["spans"] for at in range(span["start"], span["end"])]
    if not found or len(found) != len(places):
        return None
    by_place: dict[int, float] = dict(zip(places, found, strict=True))
    return [None if (known := by_place.get(at)) is None else round(known, 4) for at in range(len(sample["tokens"]))]


def _turn_rewards(rollout: Mapping[str, Any]) -> dict[int, float]:
    """By completion, where each turn of the rollout is one in its conversation."""
    turns = [turn for turn in rollout.get("message_turns") or () if turn is not None]
    rewards = rollout.get("turn_rewards") or ()
    return dict(zip(turns, rewards, strict=True)) if len(turns) == len(rewards) else {}


def _sampled_in(
    ids: Sequence[int], sample: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The completions that a sample holds, each with the sample that trains it."""
    found: dict[int, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
        span["start"]: (sample, span) for span in sample["spans"]
    }
    for other in samples:
        if other is not sample:
            shared = common_prefix(ids, other["tokens"])
            for span in other["spans"]:
                if span["end"] <= shared:
                    found.setdefault(span["start"], (other, span))
    return [found[start] for start in sorted(found)]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with together."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _doubtful(
    vocabulary: TokenTexts | None,
    ids: Sequence[int],
    segments: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    rollout: Mapping[str, Any],
) -> bool:
    """Whether a message of the conversation is not the text of its tokens: the vocabulary is another model's."""
    if vocabulary is None:
        return False
    turns = {turn: at for at, turn in enumerate(rollout.get("message_turns") or ()) if turn is not None}
    for each in segments:
        at = turns.get(each.get("turn"))
        content = messages[at].get("content") if at is not None else None
        words = content.split()[:3] if isinstance(content, str) else []
        text = vocabulary.decode(ids[each["start"] : each["end"]])
        if words and not all(word in text for word in words if "\ufffd" not in word):
            return True
    return False


def _choices(sample: Mapping[str, Any]) -> list[int] | None:
    """How many ids each token was sampled from, where the server reported them."""
    mask = sample.get("sampling_mask")
    if not mask:
        return None
    import numpy

    counts: list[int] = numpy.frombuffer(base64.b64decode(mask["counts"]), "<u4").tolist()
    return counts
