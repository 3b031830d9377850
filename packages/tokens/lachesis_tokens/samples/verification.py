"""Offline verification of token samples: each span after its exact prefix, each token once, nothing else.

`verify` checks one sample. `RecordVerifier` takes the records of a file and also finds errors across samples: a token
that is trained twice, or that is in no sample. A malformed record is a problem, never an exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from lachesis_messages.images import image_problems, joined_data
from lachesis_messages.records.digests import LINE_DIGEST, sample_line_problem
from lachesis_messages.records.sampling_record import sampling_problem
from lachesis_messages.tokens import MASKED, MASKED_LOGPROB, TokenPrefix
from lachesis_tokens.samples.cross_checks import line_problems
from lachesis_tokens.samples.group_accounts import GroupAccount, Runs, account_of
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.samples import SampledSpan, TokenSample, logprobs_digest


def verify(sample: TokenSample | Mapping[str, Any], *, on_policy: bool = True) -> list[str]:
    """The reasons to reject a sample, or its record. Empty for a valid one.

    Args:
        on_policy: its logprobs enter the loss. With cross-entropy they do not, so how it was sampled does not matter.
    """
    try:
        reasons, _ = _examine(sample if isinstance(sample, TokenSample) else read_sample(sample), on_policy=on_policy)
    except MalformedSample as error:
        return [str(error)]
    return reasons


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a file."""

    line: int | None
    """From 1; None for an error across lines."""
    rollout_id: str
    """Empty where the record names none."""
    reason: str


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts over a set of records, in tokens unless stated otherwise."""

    samples: int
    """Samples, rejected ones included."""
    rollouts: int
    """Rollouts that a sample, `undelivered` or the record of a group names as scored."""
    sampled: int
    """Tokens that the models sampled."""
    delivered: int
    """Of those, trained in a valid sample; each counted once."""
    duplicated: int
    """Trained again, in a second sample of the rollout, in another rollout or in a repeated sample."""
    wrong_prefix: int
    """Trained after another prefix than the one after which they were sampled."""
    undelivered: int
    """Left out on purpose, according to the groups: also rollouts without a score, broken starts, and `beside`."""
    unchecked: int
    """Of the delivered ones, after a prompt of which the server repeated neither the ids nor the length."""
    without_digest: int
    """Lines, not tokens: groups and samples that an older version wrote, without a digest of all that is not tokens."""
    lost: int
    """Neither delivered nor left out on purpose."""
    rejected: int
    """Invalid samples. Their tokens are lost."""
    problem_count: int
    problems: tuple[Problem, ...] = ()
    """The first of them."""
    empty: bool = False
    """There is no sample, and that is the only problem: nothing could be verified."""

    @property
    def ok(self) -> bool:
        """Whether there is no problem at all."""
        return not self.problem_count


def verify_records(records: Iterable[Any], *, max_problems: int = 20) -> Totals:
    """Totals over the parsed lines of a file; see `RecordVerifier`. Lines are numbered from 1."""
    verifier = RecordVerifier(max_problems=max_problems)
    for line, record in enumerate(records, 1):
        verifier.feed(record, line)
    return verifier.totals()


@dataclass(slots=True)
class _Rollout:
    sampled: int | None = None
    count: int | None = None
    claimed: int = 0
    """The number of sampled tokens according to invalid samples, used where no valid sample states it."""
    delivered: int = 0
    undelivered: int | None = None
    stated: int = 0
    """The number of sampled tokens according to the record of the rollout."""
    turns: set[int] = field(default_factory=set)
    indexes: set[int] = field(default_factory=set)
    needs_sample: bool = False
    """It has a score, and its record names completions."""


class RecordVerifier:
    """Takes the records of a file one at a time: samples, or groups with `samples`.

    `undelivered` of a group is `{rollout_id: tokens}`: sampled tokens that were left out on purpose. If a group has
    `rollouts`, as those of `process` do, its samples have to hold the tokens that these say were sampled, and no
    `number` of a group of its run may be missing. Samples of an evaluation may be sampled in any way: they train
    nothing. The verifier keeps a few numbers for each rollout, turn and group, never the tokens.
    """

    def __init__(self, *, max_problems: int = 20) -> None:
        self._max_problems = max_problems
        self._problems: list[Problem] = []
        self._problem_count = 0
        self._rollouts: dict[str, _Rollout] = {}
        self._runs = Runs()
        self._completions: dict[str, tuple[str, int]] = {}
        """By `completion_id`: the first rollout that trains it, and the turn that it is there."""
        self._elsewhere = 0
        """Tokens of completions that an earlier rollout trains."""
        self._left_out = 0
        self._samples = self._rejected = self._duplicated = self._wrong_prefix = 0
        self._unchecked = 0
        self._without_digest = 0

    def feed(self, record: Any, line: int | None = None) -> None:
        """One parsed line."""
        if not isinstance(record, Mapping):
            self.reject(f"is {type(record).__name__}, not an object", line)
        elif isinstance(record.get("samples"), (list, tuple)):
            self._feed_group(record, line)
        elif "tokens" in record and "spans" in record:
            sample = self._feed_sample(record, line, "", measures=record.get("evaluation") is True)
            self._without_digest += sample is not None and not sample.digest
            for problem in (sample_line_problem(record), self._runs.of_sample(record)):
                if problem is not None:
                    self.reject(problem, line)
        else:
            self.reject("is neither a sample (with tokens and spans) nor a group with samples", line)

    def _feed_group(self, group: Mapping[str, Any], line: int | None) -> None:
        data = joined_data(each.get("image_data") for each in group["samples"] if isinstance(each, Mapping))
        samples, measures = [], group.get("evaluation") is True
        for at, record in enumerate(group["samples"]):
            of_group = data and isinstance(record, Mapping) and record.get("images")
            record = {**record, "image_data": data} if of_group else record
            sample = self._feed_sample(record, line, f"samples[{at}]: ", measures=measures)
            samples += [] if sample is None else [sample]
        account = account_of(group)
        digests = [sample.digest for sample in samples]
        self._without_digest += LINE_DIGEST not in group and (account is not None or not all(digests))
        if group.get("undelivered") is not None:
            self._feed_undelivered(group["undelivered"], line)
        if (problem := self._runs.add(group)) is not None:
            self.reject(problem, line)
        if account is not None:
            self._feed_account(account, line)
        for rollout_id, reason in line_problems(group, samples):
            self.reject(reason, line, rollout_id)

    def reject(self, reason: str, line: int | None = None, rollout_id: str = "") -> None:
        """Records a problem, such as a line that is not JSON."""
        self._problem_count += 1
        if len(self._problems) < self._max_problems:
            self._problems.append(Problem(line, rollout_id, reason))

    def totals(self) -> Totals:
        """The totals of all records so far."""
        across: list[tuple[str, str]] = []
        sampled = undelivered = self._left_out
        lost = 0
        for rollout_id, rollout in self._rollouts.items():
            kept = rollout.delivered + (rollout.undelivered or 0)
            known = rollout.sampled if rollout.sampled is not None else max(rollout.claimed, kept)
            of_rollout = max(known, rollout.stated)
            sampled += of_rollout
            undelivered += rollout.undelivered or 0
            lost += max(0, of_rollout - kept)
            if kept != of_rollout:
                across.append((rollout_id, _imbalance(of_rollout, rollout)))
            elif not rollout.undelivered and rollout.count not in (None, len(rollout.indexes)):
                there = f"{len(rollout.indexes)} of {rollout.count} samples"
                across.append((rollout_id, f"{there}, and nothing was left out on purpose"))
            elif rollout.needs_sample and not rollout.indexes and not rollout.undelivered:
                across.append((rollout_id, "it has a score and completions, but no sample"))
        across += [("", reason) for reason in self._runs.missing()]
        if not self._samples:  # one reason for all that it lacks
            across = [] if self._problem_count else [("", NO_SAMPLES)]
        found = [*self._problems, *(Problem(None, *each) for each in across)][: self._max_problems]
        return Totals(
            samples=self._samples,
            rollouts=len(self._rollouts),
            sampled=sampled - self._elsewhere,
            delivered=sum(rollout.delivered for rollout in self._rollouts.values()) - self._elsewhere,
            duplicated=self._duplicated,
            wrong_prefix=self._wrong_prefix,
            undelivered=undelivered,
            unchecked=self._unchecked,
            without_digest=self._without_digest,
            lost=lost,
            rejected=self._rejected,
            problem_count=self._problem_count + len(across),
            empty=not self._samples and not self._problem_count,
            problems=tuple(found),
        )

    def _feed_sample(self, record: Any, line: int | None, at: str, *, measures: bool) -> TokenSample | None:
        """The sample, unless it is invalid. `measures`: it is of an evaluation."""
        self._samples += 1
        try:
            sample = read_sample(record)
        except MalformedSample as error:
            self._rejected += 1
            self.reject(f"{at}{error}", line)
            return None
        reasons, wrong_prefix = _examine(sample, on_policy=not measures)
        self._wrong_prefix += wrong_prefix
        if not sample.rollout_id:
            reasons.append("rollout_id is empty, so its other samples are unknown; pass rollout_id= to samples()")
        else:
            rollout = self._rollouts.setdefault(sample.rollout_id, _Rollout())
            reasons += _disagreements(sample, rollout)
        for reason in reasons:
            self.reject(f"{at}{reason}", line, sample.rollout_id)
        if reasons:
            self._rejected += 1
            if sample.rollout_id:
                rollout.claimed = max(rollout.claimed, sample.sampled)
            return None
        rollout.sampled, rollout.count = sample.sampled, sample.count
        twice = [span for span in sample.spans if span.turn in rollout.turns]
        if twice:
            tokens = sum(map(len, twice))
            self._duplicated += tokens
            turns = _listed([span.turn for span in twice])
            self.reject(f"{at}{turns} ({tokens} tokens) trained again", line, sample.rollout_id)
        elif sample.index in rollout.indexes:
            self.reject(f"{at}index {sample.index} occurs twice", line, sample.rollout_id)
        rollout.indexes.add(sample.index)
        for span in sample.spans:
            if span.turn not in rollout.turns:
                self._note_completion(span, line, sample.rollout_id, at)
                rollout.turns.add(span.turn)
                rollout.delivered += len(span)
                self._unchecked += len(span) if span.prompt_checked == "none" else 0
        return sample

    def _note_completion(self, span: SampledSpan, line: int | None, rollout_id: str, at: str) -> None:
        """Equal tokens of two rollouts are two completions, as their ids say; older records have no ids."""
        own = rollout_id, span.turn
        if not span.completion_id or (first := self._completions.setdefault(span.completion_id, own)) == own:
            return
        self._elsewhere += len(span)
        self._duplicated += len(span)
        what = f"the same completion as turn {first[1]} of rollout {first[0]}"
        self.reject(f"{at}turn {span.turn} ({len(span)} tokens) trained again: it is {what}", line, rollout_id)

    def _feed_account(self, account: GroupAccount, line: int | None) -> None:
        for rollout_id, reason in account.problems:
            self.reject(reason, line, rollout_id)
        self._left_out += account.left_out
        for rollout_id, tokens in account.sampled.items():
            rollout = self._rollouts.setdefault(rollout_id, _Rollout())
            rollout.stated = max(rollout.stated, tokens)
            rollout.needs_sample = rollout_id in account.completed

    def _feed_undelivered(self, undelivered: Any, line: int | None) -> None:
        if not isinstance(undelivered, Mapping):
            self.reject(f"undelivered is {type(undelivered).__name__}, not an object", line)
            return
        for rollout_id, tokens in undelivered.items():
            if not isinstance(rollout_id, str) or type(tokens) is not int or tokens < 0:
                self.reject(f"undelivered: {rollout_id!r}: {tokens!r} is not a number of tokens", line)
                continue
            rollout = self._rollouts.setdefault(rollout_id, _Rollout())
            if rollout.undelivered is None:
                rollout.undelivered = tokens
            else:
                self.reject("undelivered names this rollout a second time", line, rollout_id)


def _examine(sample: TokenSample, *, on_policy: bool = True) -> tuple[list[str], int]:
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
        return [f"tokens[{at}] is {_cut(sample.tokens[at])}: token ids are 0 to {_ID_LIMIT - 1}"]
    return []


def _span_problems(sample: TokenSample) -> list[str]:
    if not sample.spans:
        return ["it has no spans, so it trains nothing"]
    turns: set[int] = set()
    at = 0
    for place, span in enumerate(sample.spans):
        if not at <= span.start < span.end <= len(sample.tokens):
            before = f", the one before ends at {at}" if at else ""
            where = f"{_cut(span.start)} to {_cut(span.end)} of {len(sample.tokens)} tokens{before}"
            return [f"spans[{place}] is out of order, empty or beyond the end: {where}"]
        if span.turn < 0 or span.turn in turns:
            return [f"spans[{place}]: turn {_cut(span.turn)} is {'negative' if span.turn < 0 else 'repeated'}"]
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
    found = [f"{_listed(misplaced)} after another prefix than when it was sampled"] if misplaced else []
    found += [f"{_listed(altered)} with ids that differ from the sampled ones"] if altered else []
    return found, wrong_prefix


def _mask_problems(sample: TokenSample) -> list[str]:
    found: list[str] = []
    changed: list[int] = []
    at = 0
    for span in (*sample.spans, None):
        end = span.start if span is not None else len(sample.tokens)
        if sample.masks[at:end].count(MASKED) != end - at:
            place = next(p for p in range(at, end) if sample.masks[p] != MASKED)
            found.append(f"masks[{place}] is {_cut(sample.masks[place])}, but no span trains it")
        if sample.logprobs[at:end].count(MASKED_LOGPROB) != end - at:
            place = next(p for p in range(at, end) if sample.logprobs[p] != MASKED_LOGPROB)
            found.append(f"logprobs[{place}] is {_cut(sample.logprobs[place])} where nothing is trained, not 1.0")
        if span is None:
            break
        at = span.end
        if sample.masks[span.start : at] != sample.tokens[span.start : at]:
            place = next(p for p in range(span.start, at) if sample.masks[p] != sample.tokens[p])
            wanted = f"the trained token is {sample.tokens[place]}"
            found.append(f"masks[{place}] is {_cut(sample.masks[place])}, but {wanted}")
        values = sample.logprobs[span.start : at]
        wrong = _logprob_problem(values)
        if wrong is not None:
            found.append(f"logprobs[{span.start + wrong}] is {_cut(values[wrong])}, not the logprob of a trained token")
        elif logprobs_digest(values) != span.logprobs_digest:
            changed.append(span.turn)
    if changed:
        found.append(f"{_listed(changed)} with logprobs that differ from the reported ones")
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
    return [f"{_listed(turns)}: {reason}" for reason, turns in found.items()]


def _version_problems(sample: TokenSample) -> list[str]:
    """Ranges of versions that do not cover exactly the tokens of their span, and impossible numbers of interrupts."""
    found: list[str] = []
    for span in sample.spans:
        begins = [0, *(end for _, _, end in span.versions)]
        fits = all(
            name and begin == start < end for begin, (name, start, end) in zip(begins, span.versions, strict=False)
        )
        if span.versions and not (fits and begins[-1] == len(span)):
            ranges = ", ".join(f"{version!r} {_cut(start)}-{_cut(end)}" for version, start, end in span.versions[:5])
            found.append(f"turn {span.turn}: the versions {ranges} are not ranges over its {len(span)} tokens")
        if not 0 <= span.interrupts < len(span):
            found.append(f"turn {span.turn}: {_cut(span.interrupts)} interrupts in {len(span)} tokens")
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
        found += [f"{_listed(changed)} with experts that differ from the reported ones"] if changed else []
    if mask is not None and len(mask) != length:
        return [*found, f"the sampling mask is of {len(mask)} tokens, not of {length}"]
    if mask is not None and (place := mask.missing(sample.tokens)) is not None:
        found.append(f"the sampling mask of tokens[{place}] does not have the token itself")
    bare = [
        span.turn
        for span in sample.spans
        if span.sampling.get("sampling_mask") and (mask is None or not mask.covers(span.start, span.end))
    ]
    return found + ([f"{_listed(bare)} without the sampling mask that its sampling names"] if bare else [])


def _weight_problems(sample: TokenSample) -> list[str]:
    trained = sample.trained
    found: list[str] = []
    if not 0 < sample.weight <= 1:
        found.append(f"weight {_cut(sample.weight)} is not in (0, 1]")
    elif sample.sampled < trained:
        found.append(f"it trains {trained} tokens of a rollout that sampled {_cut(sample.sampled)}")
    elif not math.isclose(sample.weight, trained / sample.sampled, rel_tol=1e-9):
        found.append(f"weight {sample.weight!r} is not its share, {trained} of {sample.sampled} sampled tokens")
    if not 0 <= sample.index < sample.count:
        found.append(f"index {_cut(sample.index)} is none of {_cut(sample.count)} samples")
    return found


def _disagreements(sample: TokenSample, rollout: _Rollout) -> list[str]:
    """The fields in which the sample contradicts an earlier sample of its rollout."""
    found: list[str] = []
    for name, value in (("sampled", sample.sampled), ("count", sample.count)):
        before = getattr(rollout, name)
        if before not in (None, value):
            found.append(f"{name} is {_cut(value)}, but {before} in an earlier sample of the rollout")
    return found


def _imbalance(sampled: int, rollout: _Rollout) -> str:
    left_out = f", {rollout.undelivered} left out on purpose" if rollout.undelivered else ""
    if rollout.delivered + (rollout.undelivered or 0) > sampled:
        return f"{rollout.delivered} tokens delivered{left_out}: more than the {sampled} that were sampled"
    return f"{rollout.delivered} of {sampled} sampled tokens delivered{left_out}"


def _listed(turns: Sequence[int]) -> str:
    shown = ", ".join(map(_cut, turns[:5])) + (f" and {len(turns) - 5} more" if len(turns) > 5 else "")
    return f"turn{'s' if len(turns) > 1 else ''} {shown}"


def _cut(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 128:
        return "a huge number"  # Python rejects decimal forms of more than 4300 digits
    return repr(value)


NO_SAMPLES: Final = (
    "has no token ids: a model that runs here records them (-m embedded, a GGUF file), and a server with "
    "--openai.server_type vllm or sglang"
)
"""The only problem of a file that is `empty`."""
_INTEGERS: Final[frozenset[type]] = frozenset({int})
_NUMBERS: Final[frozenset[type]] = frozenset({float, int})
_ID_LIMIT: Final = 1 << 32
_FLOAT_LIMIT: Final = 1.7976931348623157e308
