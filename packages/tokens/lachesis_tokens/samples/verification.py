"""Offline verification of token samples: each span after its exact prefix, each token once, nothing else.

`verify` checks one sample. `RecordVerifier` takes the records of a file and also finds errors across samples: a token
that is trained twice, or that is in no sample. A malformed record is a problem, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lachesis_messages.images import with_image_data
from lachesis_messages.records.digests import LINE_DIGEST, sample_line_problem
from lachesis_tokens.samples.cross_checks import line_problems
from lachesis_tokens.samples.group_accounts import GroupAccount, Runs, account_of
from lachesis_tokens.samples.sample_problems import cut, listed, problems_in
from lachesis_tokens.samples.sample_records import MalformedSample, read_sample
from lachesis_tokens.samples.samples import SampledSpan, TokenSample

NO_SAMPLES: Final = (
    "has no token ids: a model that runs here records them (-m embedded, a GGUF file), and a server with "
    "--openai.server_type vllm or sglang"
)
"""The only problem of a file that is `empty`."""
_BESIDE_IDS: Final = ("images", "experts", "sampling_mask")


def not_written(sample: TokenSample) -> list[str]:
    """What the sample has and a row of ids, masks and logprobs does not hold: without it, a trainer computes other
    logprobs."""
    return [f"it has {name}, which are not written" for name in _BESIDE_IDS if getattr(sample, name)]


def verify(sample: TokenSample | Mapping[str, Any], *, on_policy: bool = True) -> list[str]:
    """The reasons to reject a sample, or its record. Empty for a valid one.

    Args:
        on_policy: its logprobs enter the loss. With cross-entropy they do not, so how it was sampled does not matter.
    """
    try:
        found = sample if isinstance(sample, TokenSample) else read_sample(sample)
    except MalformedSample as error:
        return [str(error)]
    return problems_in(found, on_policy=on_policy)[0]


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
        samples, measures = [], group.get("evaluation") is True
        for at, record in enumerate(with_image_data(group["samples"])):
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
        reasons, wrong_prefix = problems_in(sample, on_policy=not measures)
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
            turns = listed([span.turn for span in twice])
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


def _disagreements(sample: TokenSample, rollout: _Rollout) -> list[str]:
    """The fields in which the sample contradicts an earlier sample of its rollout."""
    found: list[str] = []
    for name, value in (("sampled", sample.sampled), ("count", sample.count)):
        before = getattr(rollout, name)
        if before not in (None, value):
            found.append(f"{name} is {cut(value)}, but {before} in an earlier sample of the rollout")
    return found


def _imbalance(sampled: int, rollout: _Rollout) -> str:
    left_out = f", {rollout.undelivered} left out on purpose" if rollout.undelivered else ""
    if rollout.delivered + (rollout.undelivered or 0) > sampled:
        return f"{rollout.delivered} tokens delivered{left_out}: more than the {sampled} that were sampled"
    return f"{rollout.delivered} of {sampled} sampled tokens delivered{left_out}"
