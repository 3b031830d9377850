"""What `lachesis audit` prints: the verdict, what to do about each finding, and only policies that say something."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from lachesis_console.auditing.findings import AuditFinding, Findings
from lachesis_console.auditing.of_rewards import Rewards
from lachesis_console.auditing.records import AuditPlay, EnvironmentFacts, map_shown
from lachesis_console.auditing.report import Audit
from lachesis_console.verbs.audit import print_audit

CHEAT = "cheat: a conftest.py that skips all tests"


PLAYS = [
    AuditPlay(0, "reference", "first", 1.0),
    AuditPlay(0, CHEAT, "first", 1.0),
    *(AuditPlay(0, f"answer: {word}", "first", 0.0) for word in ("7", "A", "no")),
    AuditPlay(0, "noise: huge text", "first", None),
]


def shown(
    findings: Sequence[AuditFinding],
    plays: Sequence[AuditPlay] = PLAYS,
    *,
    left_out: Sequence[str] = (),
    width: int = 0,
    every: bool = False,
) -> str:
    found = Audit("env.py", 0.0, 1.0, findings, plays, EnvironmentFacts(left_out=[*left_out]), {})
    console = Console(file=io.StringIO(), width=width or 80, force_terminal=bool(width), color_system=None)
    print_audit(console, found, every=every)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def cheats() -> AuditFinding:
    evidence = map_shown([AuditPlay(0, CHEAT, "first", 1.0, turns=[{"text": "Done.", "calls": []}])])
    findings = Findings()
    findings.add("cheat-passes", "error", f"{CHEAT}: full marks on 2 items", evidence)
    return findings.found[0]


def test_the_first_line_is_the_verdict() -> None:
    note = AuditFinding("duplicates", "note", "2 items are there twice")
    assert shown([cheats(), note]).splitlines()[0] == "env.py: 1 error, 1 note in 6 policies, 6 rollouts"
    assert shown([]).splitlines()[0] == "env.py: nothing found in 6 policies, 6 rollouts"


def test_the_verdict_says_what_was_not_looked_at_and_that_nothing_had_a_score() -> None:
    said = shown([], [AuditPlay(0, "nothing", "first", None)], left_out=["the reference policy: there is none"])
    assert (
        said.splitlines()[0] == "env.py: nothing found in 1 policy, 1 rollout; 1 not looked at; no rollout had a score"
    )
    assert shown([], []).splitlines()[0] == "env.py: nothing found in 0 policies, 0 rollouts; no rollout had a score"


def test_every_policy_of_a_finding_is_one_of_it_and_a_missing_score_is_said() -> None:
    failed = [AuditPlay(0, f"answer: {number}", "first", None) for number in range(8)]
    findings = Findings()
    findings.add("unscored", "warning", "8 policies: 8 rollouts without a score", map_shown(failed))
    flaky = [AuditPlay(at, "noise: flaky", "first", 0.0 if at else None) for at in range(3)]
    said = shown(findings.found, [*PLAYS, *failed, *flaky])
    assert len(findings.found[0].to_record()["evidence"]) == 5 and "policies" not in findings.found[0].to_record()
    assert "1 with a score in some rollouts only (3 rollouts)" in said and "1 with no score (1 rollout)" in said
    assert all(f"\nanswer: {number} " in said for number in range(8))


@pytest.mark.parametrize("width", [50, 80, 140])
def test_findings_are_wrapped_between_words(width: int) -> None:
    lines = shown([cheats()], width=width).splitlines()
    finding = lines[2 : lines.index("", 2)]
    assert max(map(len, finding)) <= width
    said = " ".join(" ".join(finding).split())
    assert f"error: {CHEAT}: full marks on 2 items on item 0, by {CHEAT}, reward 1, “Done.” = score in a place" in said
    assert said.endswith("ctx.judge_pytest (cheat-passes)")


def test_only_policies_of_findings_and_those_to_compare_with_have_rows() -> None:
    table = shown([cheats()]).partition("\npolicy")[2]
    assert [line.split()[0] for line in table.splitlines() if " 1  " in line] == ["reference", "cheat:"]
    assert "answer: 7" not in table
    assert "without a finding: 3 with reward 0 (3 rollouts), 1 with no score (1 rollout); --all" in table
    every = shown([cheats()], every=True)
    assert "answer: 7" in every and "without a finding" not in every


def test_an_exception_shows_its_lines_once() -> None:
    text = 'rest of a line\n  File "env.py", line 3, in pays\n    answer["x"]\n    ~~~~~~^^^^^\n'
    evidence = [{"item": at, "policy": "nothing", "reward": None, "text": text} for at in range(2)]
    said = shown([AuditFinding("exception", "error", "nothing: KeyError: 'x'", evidence)])
    assert said.count('File "env.py", line 3, in pays\n') == said.count('answer["x"]\n') == 1
    assert "rest of a line" not in said and "~~~" not in said and "\\n" not in said


@pytest.mark.parametrize("words", [{"prompt": "Write answer.json."}, {"told": "Each answer is in answer.json."}])
def test_a_file_that_the_environments_own_words_name_may_be_read_in_the_sandbox(words: dict[str, str]) -> None:
    def codes(**given: str) -> list[str]:
        findings = Findings()
        play = AuditPlay(0, "nothing", "first", 0.0, looks=["ctx.read_file('answer.json')"], **given)  # type: ignore[arg-type]
        Rewards([play], EnvironmentFacts(), findings)._looks()
        return [each.code for each in findings.found]

    assert codes() == ["reads-agents-files"]
    assert codes(**words) == []
