"""What is wrong with a sample by itself: its lists and spans, the prefix of each span, masks, turns and versions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from lachesis_messages.images import image_problems
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_messages.tokens import MASKED, MASKED_LOGPROB, TokenPrefix
from lachesis_tokens.samples.samples import SampledSpan, TokenSample, logprobs_digest


def problems_in(sample: TokenSample, *, on_policy: bool = True) -> tuple[list[str], int]:
    """The problems, and the number of tokens after a wrong prefix. Digests can be checked where lists and spans fit."""
    if unreadable := _list_problems(sample) or _span_problems(sample):
        return unreadable, 0
    misplaced, wrong_prefix = _digest_problems(sample)
    found = misplaced + _mask_problems(sample) + _turn_problems(sample) + _replay_problems(sample)
    trained = ((span.turn, span.start, span.end, span.images_digest) for span in sample.spans)
    found += image_problems(sample.images, sample.tokens, trained)
    found += _header_problems(sample)
    if on_policy:
        found += _sampling_problems(sample)
    return found + _version_problems(sample) + _weight_problems(sample), wrong_prefix


def _header_problems(sample: TokenSample) -> list[str]:
    if not sample.digest:
        # Older versions wrote neither.
        return ["its digest is missing"] if any(span.messages_digest for span in sample.spans) else []
    try:
        digest = sample.header_digest()
    except (RecursionError, TypeError, ValueError) as error:
        return [f"its digest cannot be computed: {error}"]
    if digest != sample.digest:
        return [f"its digest does not match its fields ({digest}): they are not those that were written"]
    return []


def _list_problems(sample: TokenSample) -> list[str]:
    lengths = {"tokens": len(sample.tokens), "masks": len(sample.masks), "logprobs": len(sample.logprobs)}
    if len(set(lengths.values())) > 1:
        return ["lengths differ: " + ", ".join(f"{length} {name}" for name, length in lengths.items())]
    for name, values, allowed in (
        ("tokens", sample.tokens, _INTEGERS),
        ("masks", sample.masks, _INTEGERS),
        ("logprobs", sample.logprobs, _NUMBERS),
    ):
        wrong = set(map(type, values)) - allowed
        if wrong:
            at = next(place for place, value in enumerate(values) if type(value) in wrong)
            return [f"{name}[{at}] is {type(values[at]).__name__}, not a number of the right kind"]
    if sample.tokens and not (min(sample.tokens) >= 0 and max(sample.tokens) < _ID_LIMIT):
        at = next(place for place, token in enumerate(sample.tokens) if not 0 <= token < _ID_LIMIT)
        return [f"tokens[{at}] is {cut(sample.tokens[at])}: token ids are 0 to {_ID_LIMIT - 1}"]
    return []


def _span_problems(sample: TokenSample) -> list[str]:
    if not sample.spans:
        return ["it has no spans, so it trains nothing"]
    turns: set[int] = set()
    at = 0
    for place, span in enumerate(sample.spans):
        if not at <= span.start < span.end <= len(sample.tokens):
            before = f", the one before ends at {at}" if at else ""
            where = f"{cut(span.start)} to {cut(span.end)} of {len(sample.tokens)} tokens{before}"
            return [f"spans[{place}] is out of order, empty or beyond the end: {where}"]
        if span.turn < 0 or span.turn in turns:
            return [f"spans[{place}]: turn {cut(span.turn)} is {'negative' if span.turn < 0 else 'repeated'}"]
        turns.add(span.turn)
        at = span.end
    if at != len(sample.tokens):
        return [f"{len(sample.tokens) - at} tokens after the last sampled one"]
    return []


def _digest_problems(sample: TokenSample) -> tuple[list[str], int]:
    misplaced: list[int] = []
    altered: list[int] = []
    wrong_prefix = 0
    prefix = TokenPrefix()
    for span in sample.spans:
        prefix = prefix.extend(sample.tokens[prefix.length : span.start])
        in_place = prefix.digest == span.prefix_digest
        prefix = prefix.extend(sample.tokens[span.start : span.end])
        if not in_place:
            misplaced.append(span.turn)
            wrong_prefix += len(span)
        elif prefix.digest != span.digest:
            altered.append(span.turn)
    found = [f"{listed(misplaced)} after another prefix than when it was sampled"] if misplaced else []
    found += [f"{listed(altered)} with ids that differ from the sampled ones"] if altered else []
    return found, wrong_prefix


def _mask_problems(sample: TokenSample) -> list[str]:
    found: list[str] = []
    changed: list[int] = []
    at = 0
    for span in (*sample.spans, None):
        end = span.start if span is not None else len(sample.tokens)
        if sample.masks[at:end].count(MASKED) != end - at:
            place = next(p for p in range(at, end) if sample.masks[p] != MASKED)
            found.append(f"masks[{place}] is {cut(sample.masks[place])}, but no span trains it")
        if sample.logprobs[at:end].count(MASKED_LOGPROB) != end - at:
            place = next(p for p in range(at, end) if sample.logprobs[p] != MASKED_LOGPROB)
            found.append(f"logprobs[{place}] is {cut(sample.logprobs[place])} where nothing is trained, not 1.0")
        if span is None:
            break
        at = span.end
        if sample.masks[span.start : at] != sample.tokens[span.start : at]:
            place = next(p for p in range(span.start, at) if sample.masks[p] != sample.tokens[p])
            wanted = f"the trained token is {sample.tokens[place]}"
            found.append(f"masks[{place}] is {cut(sample.masks[place])}, but {wanted}")
        values = sample.logprobs[span.start : at]
        wrong = _logprob_problem(values)
        if wrong is not None:
            found.append(f"logprobs[{span.start + wrong}] is {cut(values[wrong])}, not the logprob of a trained token")
        elif logprobs_digest(values) != span.logprobs_digest:
            changed.append(span.turn)
    if changed:
        found.append(f"{listed(changed)} with logprobs that differ from the reported ones")
    return found


def _logprob_problem(values: Sequence[float]) -> int | None:
    """The place of the first value that is not finite or is positive."""
    try:
        if all(map(math.isfinite, values)) and max(values) <= 0:
            return None
    except OverflowError:  # an integer beyond float64
        pass
    return next(place for place, value in enumerate(values) if not -_FLOAT_LIMIT <= value <= 0)


def _turn_problems(sample: TokenSample) -> list[str]:
    found: list[str] = []
    ends = frozenset(sample.end_of_turn)
    for span in sample.spans:
        ids = sample.tokens[span.start : span.end]
        last = ids.pop()
        if not ends.isdisjoint(ids):
            place = next(place for place, token in enumerate(ids) if token in ends)
            found.append(
                f"turn {span.turn} goes on after its end-of-turn token (tokens[{span.start + place}] = {ids[place]}): "
                f"the server did not stop there; set stop_token_ids [{ids[place]}]"
            )
        if last in ends and span.end < len(sample.tokens) and sample.tokens[span.end] == last:
            found.append(f"the end-of-turn token of turn {span.turn} is repeated (tokens[{span.end}] = {last})")
    return found


def _sampling_problems(sample: TokenSample) -> list[str]:
    """Turns whose logprobs are not those that a trainer computes."""
    found: dict[str, list[int]] = {}
    for span in sample.spans:
        if (reason := _sampling_problem(span)) is not None:
            found.setdefault(reason, []).append(span.turn)
    return [f"{listed(turns)}: {reason}" for reason, turns in found.items()]


def _version_problems(sample: TokenSample) -> list[str]:
    """Ranges of versions that do not cover exactly the tokens of their span, and impossible numbers of interrupts."""
    found: list[str] = []
    for span in sample.spans:
        begins = [0, *(end for _, _, end in span.versions)]
        fits = all(
            name and begin == start < end for begin, (name, start, end) in zip(begins, span.versions, strict=False)
        )
        if span.versions and not (fits and begins[-1] == len(span)):
            ranges = ", ".join(f"{version!r} {cut(start)}-{cut(end)}" for version, start, end in span.versions[:5])
            found.append(f"turn {span.turn}: the versions {ranges} are not ranges over its {len(span)} tokens")
        if not 0 <= span.interrupts < len(span):
            found.append(f"turn {span.turn}: {cut(span.interrupts)} interrupts in {len(span)} tokens")
        named = "+".join(dict.fromkeys(name for name, _, _ in span.versions))
        if named and span.model_version not in (None, named):
            found.append(f"turn {span.turn}: its version is {span.model_version!r}, that of its tokens {named!r}")
    return found


def _sampling_problem(span: SampledSpan) -> str | None:
    try:
        return sampling_problem(span.sampling)
    except (ArithmeticError, TypeError, ValueError) as error:
        return f"the sampling record cannot be read: {error}"


def _replay_problems(sample: TokenSample) -> list[str]:
    """Routed experts and sampling masks belong to the tokens that they come with."""
    found: list[str] = []
    experts, mask, length = sample.experts, sample.sampling_mask, len(sample.tokens)
    if experts is not None and (experts.start, experts.end) != (0, length - 1):
        found.append(
            f"experts are those of tokens {experts.start} to {experts.end}, not of all {length} but the last: a server "
            "reported none for a part of it"
        )
    else:
        changed = [
            span.turn
            for span in sample.spans
            if span.experts_digest != ("" if experts is None else experts.digest(span.start - 1, span.end - 1))
        ]
        found += [f"{listed(changed)} with experts that differ from the reported ones"] if changed else []
    if mask is not None and len(mask) != length:
        return [*found, f"the sampling mask is of {len(mask)} tokens, not of {length}"]
    if mask is not None and (place := mask.missing(sample.tokens)) is not None:
        found.append(f"the sampling mask of tokens[{place}] does not have the token itself")
    bare = [
        span.turn
        for span in sample.spans
        if span.sampling.get("sampling_mask") and (mask is None or not mask.covers(span.start, span.end))
    ]
    return found + ([f"{listed(bare)} without the sampling mask that its sampling names"] if bare else [])


def _weight_problems(sample: TokenSample) -> list[str]:
    trained = sample.trained
    found: list[str] = []
    if not 0 < sample.weight <= 1:
        found.append(f"weight {cut(sample.weight)} is not in (0, 1]")
    elif sample.sampled < trained:
        found.append(f"it trains {trained} tokens of a rollout that sampled {cut(sample.sampled)}")
    elif not math.isclose(sample.weight, trained / sample.sampled, rel_tol=1e-9):
        found.append(f"weight {sample.weight!r} is not its share, {trained} of {sample.sampled} sampled tokens")
    if not 0 <= sample.index < sample.count:
        found.append(f"index {cut(sample.index)} is none of {cut(sample.count)} samples")
    return found


def listed(turns: Sequence[int]) -> str:
    shown = ", ".join(map(cut, turns[:5])) + (f" and {len(turns) - 5} more" if len(turns) > 5 else "")
    return f"turn{'s' if len(turns) > 1 else ''} {shown}"


def cut(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"  # Python rejects decimal forms of more than 4300 digits
    return repr(value)


_INTEGERS: Final[frozenset[type]] = frozenset({int})
_NUMBERS: Final[frozenset[type]] = frozenset({float, int})
_ID_LIMIT: Final = 1 << 32
_FLOAT_LIMIT: Final = 1.7976931348623157e308
