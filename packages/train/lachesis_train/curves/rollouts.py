"""`rollouts/step_N.jsonl`: the data that was trained in each step, one group per line, readable by `lachesis
verify`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lachesis_messages.records.digests import certified, copies_of
from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_messages.records.step_files import SCHEMA, step_files
from lachesis_messages.tokens import MASKED
from lachesis_tokens.samples.group_shapes import CERTIFICATE, samples_from_atropos
from lachesis_tokens.samples.samples import TokenSample
from lachesis_train.curves.records import GroupRecord, SampleRecord, StepRecord

log = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]


class RolloutFiles:
    """The files of one run, at most `limit` bytes together.

    A step takes at most a quarter of that: groups that do not fit are written without tokens, messages and texts. When
    the files grow beyond the limit, those of the oldest steps are deleted, except the first.
    """

    def __init__(self, folder: Path, *, limit: int, decode: Decode | None) -> None:
        self._folder = folder
        self._limit = limit
        self._decode = decode
        self._deleted = False

    def rewind(self, step: int) -> None:
        """Delete the files of `step` and later ones, which will be trained again."""
        for number, path in step_files(self._folder):
            if number >= step:
                path.unlink()

    def write(self, record: StepRecord) -> None:
        """Write the file of a step that has groups, whole or not at all."""
        if not self._limit or not record.groups:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{record.step:05}.jsonl"
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.unlink(missing_ok=True)
        left = self._limit // 4
        with JsonlWriter(temporary) as file:
            for group in record.groups:
                line = group_line(record, group, self._decode)
                size = file.encode(line)
                if len(size) > left:
                    size = file.encode(shortened(line, len(size)))
                left -= len(size)
                file.write_line(size)
        temporary.replace(path)
        self._delete_oldest(path)

    def _delete_oldest(self, newest: Path) -> None:
        sizes = {path: path.stat().st_size for _, path in step_files(self._folder)}
        total = sum(sizes.values())
        for path in list(sizes)[1:]:
            if total <= self._limit or path == newest:
                break
            total -= sizes[path]
            path.unlink()
            if not self._deleted:
                self._deleted = True
                log.warning(
                    "%s: over %d bytes; the rollouts of the oldest steps are deleted, from %s on",
                    self._folder,
                    self._limit,
                    path.name,
                )


def group_line(record: StepRecord, group: GroupRecord, decode: Decode | None) -> dict[str, Any]:
    """The line of one group: its samples with their certificates, and under `training` what became of each."""
    body = group.body
    line: dict[str, Any] = {
        "schema": SCHEMA,
        "step": record.step,
        "version": record.version,
        "batch_id": record.batch_id,
        "skipped": group.skipped,
        "detail": group.detail,
        "env_id": body.get("env_id"),
        "group_id": (body.get("group_overrides") or {}).get("group_id"),
        "scores": body.get("scores"),
        "messages": body.get("messages"),
    }
    try:
        samples = samples_from_atropos(body)
    except ValueError:  # a group of a stock environment
        samples = []
        line |= {name: body.get(name) for name in ("tokens", "masks", "inference_logprobs")}
    line["samples"] = [sample.to_record() for sample in samples]
    line["undelivered"] = _undelivered(samples)
    line["training"] = [_training(body, at, sample, decode) for at, sample in enumerate(samples_of(group))]
    return certified(line)


def samples_of(group: GroupRecord) -> list[SampleRecord]:
    """One record for each sequence of the group, also where it was skipped as a whole."""
    if group.samples or group.skipped is None:
        return list(group.samples)
    count = len(group.body.get("tokens") or ())
    return [SampleRecord(skipped=group.skipped, detail=group.detail)] * count


def shortened(line: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The line without all that is long; its tokens count as undelivered."""
    sampled = {sample["rollout_id"]: sample["sampled"] for sample in line["samples"]}
    training = [{**each, "text": None, "trainer_logprobs": None} for each in line["training"]]
    long = ("messages", "tokens", "masks", "inference_logprobs")
    kept = {name: value for name, value in line.items() if name not in long}
    short = {**kept, "samples": [], "undelivered": sampled, "training": training, "shortened": size}
    return copies_of(line)(short)


def _undelivered(samples: Sequence[TokenSample]) -> dict[str, int]:
    """Sampled tokens that did not come with the group, by rollout."""
    left = {sample.rollout_id: sample.sampled for sample in samples}
    for sample in samples:
        left[sample.rollout_id] -= sample.trained
    return {rollout_id: tokens for rollout_id, tokens in left.items() if tokens > 0}


def _training(body: Mapping[str, Any], at: int, sample: SampleRecord, decode: Decode | None) -> dict[str, Any]:
    certificate = certificate_of(body, at)
    spans = certificate.get("spans") or [{}]
    kept = ("judged_score", "length_penalty", *(("tree",) if certificate else ()))
    return {
        "rollout_id": certificate.get("rollout_id"),
        "outcome": certificate.get("outcome"),
        "finish_reason": spans[-1].get("finish_reason"),
        "skipped": sample.skipped,
        "detail": sample.detail,
        "advantage": sample.advantage,
        **{name: value for name, value in override_of(body, at).items() if name in kept},
        "staleness": sample.staleness,
        "repaired_calls": repaired_calls(body, at),
        "trainer_logprobs": list(sample.trainer_logprobs),
        "text": _text(body, at, decode),
    }


def _text(body: Mapping[str, Any], at: int, decode: Decode | None) -> list[list[Any]] | None:
    """The text of each part of the sequence, and whether it is trained."""
    try:
        return None if decode is None else [[trained, decode(ids)] for trained, ids in segments(body, at)]
    except (LookupError, OverflowError, TypeError, ValueError):  # a group that was refused because it holds no tokens
        return None


def certificate_of(body: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    """The certificate of one sequence of a group; empty where it has none."""
    found = override_of(body, at).get(CERTIFICATE)
    return found if isinstance(found, Mapping) else {}


def override_of(body: Mapping[str, Any], at: int) -> Mapping[str, Any]:
    """`overrides[at]` of a group; empty where it has none."""
    overrides = body.get("overrides") or ()
    given = overrides[at] if at < len(overrides) else None
    return given if isinstance(given, Mapping) else {}


def environment_of(body: Mapping[str, Any]) -> str | None:
    """The name of the environment that a group says it is of; the digest of the group covers it."""
    name = (body.get("group_overrides") or {}).get("environment")
    return name if isinstance(name, str) and re.fullmatch(r"[\w.-]+", name) else None


def repaired_calls(body: Mapping[str, Any], at: int) -> tuple[int, int]:
    """How many calls the parser repaired in the rollout of one sequence, and how many it read; (0, 0) if unknown."""
    found = override_of(body, at).get("repaired_calls")
    if not isinstance(found, list) or len(found) != 2 or not all(type(count) is int for count in found):
        return 0, 0
    repaired, parsed = found
    return (repaired, parsed) if 0 <= repaired <= parsed else (0, 0)


def segments(body: Mapping[str, Any], at: int) -> Iterator[tuple[bool, list[int]]]:
    """The tokens of one sequence, cut where trained ones begin and end; whether each part is trained."""
    tokens, masks = body["tokens"][at], body["masks"][at]
    start = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or (masks[end] == MASKED) != (masks[start] == MASKED):
            yield masks[start] != MASKED, tokens[start:end]
            start = end
