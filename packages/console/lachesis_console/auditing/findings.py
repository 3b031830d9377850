"""What an audit finds: a code, how bad it is, what was seen, and the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "note"]

NEXT_STEPS: Final[Mapping[str, str]] = {
    "any-answer-passes": "let the reward compare the answer with the right one; see that its tests run and can fail",
    "answer-in-tools": "let tools say that an answer is wrong, and not which one is right",
    "answer-in-prompt": "take the answer out of the prompt",
    "ceiling": "play the reference policy on this item, and read what the reward compares",
    "cheat-passes": "score in a place that the agent cannot write, such as ctx.seal or ctx.judge_pytest",
    "constant-answer": "balance the answers of the items, or give no reward for this answer",
    "destroying-passes": "check also that what has to stay is there, and score 0 where a file is missing or empty",
    "duplicates": "remove items that are there twice; those that a generator draws again now and then may stay",
    "echo-passes": "let the reward read the final answer only, not any text that contains the right one",
    "empty-prompt": "let format_prompt return the task; see that its field of the data set has a value",
    "ends-process": "raise an exception instead of ending the process",
    "evaluation-in-training": "draw evaluation items from seeds or rows that training never plays",
    "exception": "correct the statement; a rollout without a score trains nothing",
    "exception-on-odd-input": "handle answers of any form in the reward: a model will write them",
    "failure-as-score": "raise an exception where a service does not answer; a score of 0 says that the agent is wrong",
    "form-not-named": "say in the prompt which form the answer has to have, or let the reward read it without",
    "guessing-passes": "let a wrong answer cost something, or end the conversation after it",
    "idle-reward": "give nothing to an agent that does nothing: leave out items that are solved at the start",
    "infrastructure": "start what the environment depends on, and try again",
    "items-differ": "seed what chooses and orders the items",
    "length-reward": "let the reward depend on what is said, not on how much",
    "left-open": "close what a rollout opens in session(), whatever happens",
    "limit-not-enforced": "count the calls and refuse or score those beyond the limit, or do not name a limit",
    "lists-all-answers": "let the reward read one final answer, such as the last number or the last box",
    "long-prompt": "shorten the prompt, or say which context length the environment needs",
    "masked-score": "return None where a rollout has no valid score",
    "memory": "close what a rollout opens, and load data once in setup()",
    "misspelt-hook": "rename the method",
    "network-at-start": "ship the data with the environment, or name the download in its documents",
    "network-in-rollout": "take the network out of tools and rewards, or return None where it fails",
    "not-deterministic": "seed what is drawn, per item; leave times, addresses and the order of sets out of rewards",
    "more-than-asked": "compare the state, or all calls, with what was asked; a subset is not enough",
    "not-offered": "correct the choices, or the answer",
    "odd-input-passes": "give nothing where the reward cannot read the answer",
    "part-ignored": "let the reward check all that the prompt asks for",
    "partial-reward": "check whether partial credit alone is worth earning",
    "placeholder-in-prompt": "fill in the field that the prompt shows as it is",
    "prompts-alike": "say in the prompt what differs between the items",
    "prompt-cut": "show the whole text, or leave the item out",
    "random-earns": "use this as the baseline of a model, instead of 0",
    "reads-agents-files": "read answers in the agent's sandbox, and run tests by ctx.judge_pytest or in ctx.seal",
    "repeatable-reward": "pay for a step once, or take back what undoing it paid",
    "reward-never-differs": "nothing can be learned from a constant reward: see that the reward reads the rollout",
    "reward-out-of-range": "return rewards in the declared range, or declare another one",
    "right-answer-refused": "let the reward read each usual form of the answer, or say which one it has to be",
    "sentinel-reward": "return None where a rollout has no valid score",
    "slow": "prepare what rollouts need once, in an image or a cache",
    "slow-setup": "prepare what it needs once, in an image or a cache",
    "solution-in-sandbox": "give the agent a checkout without later commits, and keep answers out of its files",
    "state-leaks": "make the state of a rollout in session() or setup_sandbox(), not in the environment or a module",
    "too-slow": "give every wait of the environment a time limit",
    "tool-fails": "call the tool by hand with the arguments quoted here",
    "tool-schema": "correct the JSON schema of the tool",
    "unscored": "see why these rollouts have no score",
    "unshown-value": "say in the prompt, or show by a tool, what the reference policy knows",
    "vacuous-pass": "count a suite as passed only if at least one test ran and none was skipped",
    "wrong-answer-passes": "compare the whole answer with the expected one",
}
"""By code. docs/audit.md says more."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that was seen."""

    code: str
    severity: Severity
    said: str
    """What was seen, with counts."""
    evidence: Sequence[Mapping[str, Any]] = ()
    """`item`, `policy`, `reward`, `text`, as far as they apply: of five cases."""
    policies: frozenset[str] = frozenset()
    """Those of all cases."""

    @property
    def next_step(self) -> str:
        return NEXT_STEPS[self.code]

    def to_record(self) -> dict[str, Any]:
        record = {**asdict(self), "evidence": list(self.evidence), "next_step": self.next_step}
        del record["policies"]  # those of a longer list than the record has
        return record

    def __str__(self) -> str:
        return self.said


@dataclass(slots=True)
class Findings:
    """All of an audit, the worst first."""

    found: list[AuditFinding] = field(default_factory=list)

    def add(self, code: str, severity: Severity, said: str, evidence: Sequence[Mapping[str, Any]] = ()) -> None:
        assert code in NEXT_STEPS, code
        policies = frozenset(str(seen["policy"]) for seen in evidence if "policy" in seen)
        self.found.append(AuditFinding(code, severity, said, tuple(evidence)[:5], policies))

    def has(self, *codes: str) -> bool:
        return any(each.code in codes for each in self.found)

    def sorted(self) -> list[AuditFinding]:
        order: Sequence[str] = ("error", "warning", "note")
        return sorted(self.found, key=lambda each: order.index(each.severity))
