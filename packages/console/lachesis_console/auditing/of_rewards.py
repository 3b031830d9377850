"""Findings about rewards: what earns what, and whether the same play earns the same."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from backends.text import counted
from lachesis.figures.intervals import mean_of_values
from lachesis_console.auditing.findings import Findings
from lachesis_console.auditing.forms import form_of
from lachesis_console.auditing.records import AuditPlay, EnvironmentFacts, asked_for, map_shown, shown
from lachesis_console.auditing.sandbox_plays import suspicious

MASKS = (-100.0, -999.0, -1000.0, -9999.0, -1e6, -1e9, 999.0, 9999.0, 1e9)
"""Numbers that stand for "no score" in some environments."""
_MASKED = re.compile(r"(^|[_/])(mask|masked|mask_sample|invalid|error|failed|infra|timeout|timed_out)([_/]|$)", re.I)
_NOTHING_RAN = re.compile(r"no tests ran|collected 0 items|ran 0 tests|\b0 tests? (ran|run|collected|passed)", re.I)
_SKIPPED, _PASSED = re.compile(r"\b[1-9]\d* skipped", re.I), re.compile(r"\b[1-9]\d* passed|\bOK\b(?! \(skipped)")
_TESTS_RUN = re.compile(
    r"(tests?|cases|checks)_?(run|ran|total|executed|collected|passed|count)$|(num|n|total)_tests$", re.I
)
CHEATS = (
    ("cheat: ", "cheat-passes", ""),
    ("destroy: ", "destroying-passes", r"\b(rm|unlink|rmtree|truncate|mv|delete|remove)\b"),
    ("solution: ", "solution-in-sandbox", r"\bgit\b|\bpatch\b|solution"),
)
"""Beginning of the names of policies, code, and what the reference policy does where such a play may be the task."""
NEARLY = 0.9
"""A part of full marks beside which the rest is noise."""
_NEAR = re.compile(r"within|about|approx|toleran|nearest|round|estimat|roughly", re.IGNORECASE)
_ONLY = re.compile(
    r"nothing (else|more)|no (other|more)\b|do not (change|touch|add|book)|all else|only (the|these|those|this)\b"
    r"|exactly (one|these|those|the|\d)",
    re.IGNORECASE,
)

_CHANGED_FILES = {
    "changed": "another last value in the reference's files",
    "reversed": "the opposite order of the lines in the reference's files, where the prompt asks for an order,",
}
"""By what is done to them: how a finding calls it."""


class Rewards:
    """The plays of an audit, and what they show of the reward."""

    def __init__(self, plays: Sequence[AuditPlay], facts: EnvironmentFacts, findings: Findings) -> None:
        self.plays, self.facts, self.findings = plays, facts, findings
        self.by_policy: dict[str, list[AuditPlay]] = defaultdict(list)
        self.further = [play for play in plays if play.block == "further"]
        """Of the reference policy, on items that nothing else plays."""
        for play in plays:
            if play.block == "first":
                self.by_policy[play.policy].append(play)
        self.scored = [play for play in plays if play.reward is not None]
        solved = [play for play in self.by_policy["reference"] if play.reward is not None]
        self.full = {play.item: play.reward for play in solved if play.reward}
        """By item the reward of the reference policy."""
        self.usual = all(0 <= (play.reward or 0) <= 1 for play in self.scored)
        """Rewards are between 0 and 1: then 1 is known to be full marks."""
        self.excused: set[str] = set()

    def is_full(self, play: AuditPlay) -> bool:
        full = self.full.get(play.item, 1.0 if self.usual else None)
        return full is not None and full > 0 and play.reward is not None and play.reward >= full - 1e-9

    def worthless(self) -> list[str]:
        """Policies whose text is right for no item, or hardly any."""
        return [
            name for name in self.by_policy if name == "nothing" or name.startswith(("garbage", "noise", "answer: "))
        ]

    def judge(self) -> None:
        self._ceiling()
        self._nothing_and_anything()
        self._wrong_answers()
        self._random()
        self._length()
        self._forms()
        self._cheats()
        self._repeating()
        self._numbers()
        self._vacuous()
        self._alike()
        self._labels()
        if changed := [play for play in self.plays if play.changed]:
            said = f"{counted(len(changed), 'rollout')} changed the item that was played"
            self.findings.add("state-leaks", "error", said, map_shown(changed))
        self._looks()

    def _full(self, name: str) -> tuple[list[AuditPlay], list[AuditPlay]]:
        played = [play for play in self.by_policy.get(name, ()) if play.reward is not None]
        return [play for play in played if self.is_full(play)], played

    def _passing(self, *beginnings: str) -> dict[str, list[AuditPlay]]:
        """The policies of these names that earn full marks in each of their rollouts."""
        found = {name: self._full(name) for name in self.by_policy if name.startswith(beginnings)}
        return {name: full for name, (full, played) in found.items() if full and len(full) == len(played)}

    def _part(self, play: AuditPlay) -> float:
        """Of full marks."""
        return (play.reward or 0.0) / (self.full.get(play.item) or 1.0)

    def _ceiling(self) -> None:
        played = [*self.by_policy["reference"], *self.further]
        low = [play for play in played if play.reward is not None and play.reward < 1 - 1e-9]
        if low:
            least = min(low, key=lambda play: play.reward or 0.0)
            self.findings.add(
                "ceiling",
                "error",
                f"reference: it earns {least.reward:g} for item {least.item}, less than 1, and less than 1 on "
                f"{len(low)} of {counted(len(played), 'item')}: its answer or the reward is wrong",
                map_shown(low),
            )

    def _nothing_and_anything(self) -> None:
        """The reward of those that did nothing, said nothing that can be right, or said the same to all."""
        passing = [name for name in self.worthless() if name in self._passing("")]
        kinds = {re.split(r"[:0-9]", name)[0] for name in passing}
        if len(passing) >= 3 and len(kinds) >= 2:
            count = len(self.worthless())
            evidence = [play for name in passing for play in self.by_policy[name][:1]]
            self.findings.add(
                "any-answer-passes",
                "error",
                f"{len(passing)} of {count} policies whose answers cannot be right earn full marks on every item: "
                f"{', '.join(passing[:6])}",
                map_shown(evidence),
            )
            self.excused.update(passing)
        for name, full in self._passing("a call without effect", "noise").items():
            if len(full) >= 2 and not {name, "nothing"} & self.excused:
                code = "idle-reward" if name.startswith("a ") else "odd-input-passes"
                self.findings.add(
                    code, "error", f"{name} earns full marks on {counted(len(full), 'item')}", map_shown(full)
                )
                self.excused.add(name)
        full, played = self._full("nothing")
        earns = [play for play in played if (play.reward or 0.0) > 0]
        if "nothing" in self.excused or not played:
            pass
        elif full:
            every = len(full) == len(played)
            self.findings.add(
                "idle-reward",
                "error" if every or 2 * len(full) >= len(played) else "warning",
                f"nothing: it earns up to {max(play.reward or 0 for play in full):g}, in {len(full)} of "
                f"{counted(len(played), 'rollout')}: it can be earned without skill",
                map_shown(full),
            )
        elif earns:
            mean = sum(play.reward or 0.0 for play in played) / len(played)
            most = max([*filter(None, self.full.values()), max(play.reward or 0.0 for play in self.scored)])
            self.findings.add(
                "idle-reward",
                "error" if mean >= 0.5 * most else "warning" if mean >= 0.1 * most else "note",
                f"nothing: it earns up to {max(play.reward or 0 for play in earns):g}, in {len(earns)} of "
                f"{counted(len(played), 'rollout')} (mean {mean:.3g}, the most that any policy earned is {most:g})",
                map_shown(earns),
            )
        # A program that repairs each item alike may be skill; a text that is right for each is none.
        solved = [play for play in self._full("reference")[0] if play.turns and not play.called]
        if len({self.facts.digests[play.item] for play in solved}) >= 4 and all(
            play.turns == solved[0].turns for play in solved
        ):
            said = f"reference: the same words solve each of {counted(len(solved), 'item')}"
            self.findings.add("constant-answer", "error", said, map_shown(solved))
        for name in self.worthless():
            full, played = self._full(name)
            distinct = len({self.facts.digests[play.item] for play in played})
            if name == "nothing" or name in self.excused or distinct < 2 or 4 * len(full) < 3 * len(played):
                continue
            self.findings.add(
                "constant-answer",
                "error" if len(full) == len(played) and (distinct >= 3 or len(self.facts.digests) < 3) else "warning",
                f"{name}: the same answer to every item earns full marks on {len(full)} of {len(played)}",
                map_shown(full),
            )
            self.excused.add(name)

    def _wrong_answers(self) -> None:
        listed = "several answers in one"
        for name, code, what in (
            (listed, "lists-all-answers", "the right answer between others, in the form of one,"),
            ("another item's solution", "wrong-answer-passes", "the solution of another item"),
            ("all candidates at once", "lists-all-answers", "an answer that lists many candidates"),
            ("echo of the prompt", "echo-passes", "the prompt, repeated as the answer,"),
            ("echo of the end of the prompt", "echo-passes", "the end of the prompt, repeated as the answer,"),
        ):
            full, played = self._full(name)
            if not played or self.findings.has("any-answer-passes", "reward-never-differs"):
                continue
            if full:
                severity = "error" if len(full) == len(played) or len(full) >= 3 else "warning"
                severity = severity if 2 * len(full) >= len(played) else "note"
                said = f"{what} earns full marks on {len(full)} of {counted(len(played), 'item')}"
                self.findings.add(code, severity, said, map_shown(full))  # type: ignore[arg-type]
            elif name.startswith("echo") and all(self._part(play) >= NEARLY for play in played):
                least = min(map(self._part, played))
                said = f"{what} earns {least:.0%} of full marks or more on {counted(len(played), 'item')}"
                self.findings.add(code, "error", said, map_shown(played))
            elif name.startswith("another") and all((play.reward or 0.0) > 0 for play in played) and len(played) > 1:
                least = min(play.reward or 0.0 for play in played)
                part = max(least / (self.full.get(play.item) or 1.0) for play in played)
                self.findings.add(
                    "partial-reward",
                    "warning" if part >= 0.5 else "note",
                    f"a wrong answer in the right form earns {least:g} or more on {counted(len(played), 'item')}",
                    map_shown(played),
                )

    def _random(self) -> None:
        played = [play for name in self.by_policy if name.startswith("random") for play in self.by_policy[name]]
        rewards = [play.reward for play in played if play.reward is not None]
        earning = [play for play in played if (play.reward or 0.0) > 0]
        if not earning:
            return
        full = [play for play in played if self.is_full(play)]
        low, high = min([0.0, *rewards]), max([1.0, *rewards])
        every = len(full) == len(rewards) and len(rewards) >= 4 and not self.excused
        mean = mean_of_values(rewards, low, high)
        self.findings.add(
            "random-earns",
            "error" if every else "note",
            f"random: it earns up to {max(rewards):g}, in {len(earning)} of {counted(len(rewards), 'rollout')}: "
            f"mean {mean}",
            map_shown(earning),
        )

    def _length(self) -> None:
        """Whether longer garbage earns more."""
        names = [name for name in self.by_policy if name.startswith("garbage")]
        rows = [[play.reward for play in self.by_policy[name] if play.reward is not None] for name in names]
        if len(rows) < 3 or not all(rows) or len({*map(len, rows)}) > 1:
            return
        means = [sum(row) / len(row) for row in rows]
        rises = all(row[0] < row[-1] for row in zip(*rows, strict=True))
        if rises and means == sorted(means):
            said = ", ".join(f"{mean:.3g} ({name})" for mean, name in zip(means, names, strict=True))
            most = max(play.reward or 0.0 for play in self.scored)
            severity = "error" if means[-1] >= 0.5 * most else "warning"
            evidence = map_shown(self.by_policy[names[-1]])
            self.findings.add("length-reward", severity, f"longer garbage earns more on every item: {said}", evidence)  # type: ignore[arg-type]

    def _cheats(self) -> None:
        if self.findings.has("any-answer-passes", "reward-never-differs"):
            return
        known = {play.item for play in self._full("nothing")[0]}
        solving = " ".join(
            call["arguments"] for play in self.by_policy["reference"] for turn in play.turns for call in turn["calls"]
        )
        for prefix, code, own in CHEATS:
            passed = {
                name: full
                for name in self.by_policy
                if name.startswith(prefix)
                and (full := [play for play in self._full(name)[0] if play.item not in known])
            }
            if passed:
                # Where the reference does the like, it may be the task.
                severity = "warning" if own and re.search(own, solving) else "error"
                items = {play.item for full in passed.values() for play in full}
                said = f"{', '.join(list(passed)[:4])}: full marks on {counted(len(items), 'item')}"
                self.findings.add(code, severity, said, map_shown(full[0] for full in passed.values()))  # type: ignore[arg-type]
        found = []
        for play in self.by_policy["search of the sandbox"]:
            lines = suspicious(re.split(r"\n|\\n|\"", "\n".join(play.seen)))
            lines = [line for line in lines if line.split()[1].rpartition("/")[2] not in play.words + solving]
            found += [shown(play, "\n".join(lines))] if lines else []
        if found:
            said = f"the answer of {counted(len(found), 'item')} is in the sandbox where the agent can read it"
            self.findings.add("solution-in-sandbox", "error", said, found)

    def _forms(self) -> None:
        """A form that no text names, and wrong answers in the right form."""
        if self.findings.has("any-answer-passes", "reward-never-differs"):
            return
        right: dict[int, list[AuditPlay]] = defaultdict(list)
        for name in self.by_policy:
            for play in self.by_policy[name] if name.startswith("right: ") else ():
                right[play.item].append(play)
        refused = [item for item, played in right.items() if played and not any(map(self.is_full, played))]
        if refused and len(refused) == len(right):
            said = f"the right answer of {counted(len(refused), 'item')} earns less without a form that no text names"
            evidence = [play for item in refused for play in right[item]]
            self.findings.add("form-not-named", "error", said, map_shown(evidence))
        equal = [self._full(name) for name in self.by_policy if name.startswith("equal: ")]
        strict = [play for full, played in equal if not full for play in played]
        if strict and not refused:
            names = sorted({play.policy.removeprefix("equal: ") for play in strict})
            said = f"the right answer earns less {', '.join(names)}, which no text excludes"
            severity = "warning" if names == ["with a line break after it"] else "error"
            self.findings.add("right-answer-refused", severity, said, map_shown(strict))  # type: ignore[arg-type]
        orders = [play for name in self.by_policy if name.startswith("order: ") for play in self.by_policy[name]]
        items = {play.item for play in orders}
        if len(items) >= 3 and not any(map(self.is_full, orders)):
            said = f"each of {len(orders)} changes of the order is refused on {counted(len(items), 'item')}, and the "
            said += "prompt asks for any order that fits"
            self.findings.add("right-answer-refused", "error", said, map_shown(orders))
        for kind, what in _CHANGED_FILES.items():
            for full in self._passing(f"{kind}: ").values():
                if full := [play for play in full if _has(play, f"{kind} ")]:
                    said = f"{what} costs nothing on {counted(len(full), 'item')}"
                    self.findings.add("wrong-answer-passes", "warning", said, map_shown(full))
        hollow = [play for each in self._passing("hollow: ").values() for play in each if _has(play, "hollowed ")]
        if hollow:
            said = f"files with nothing but numbers in them earn full marks on {counted(len(hollow), 'rollout')}"
            self.findings.add("wrong-answer-passes", "error", said, map_shown(hollow))
        self._of_agents_files()
        if passed := self._passing("wrong: "):
            told = " ".join(play.words for full in passed.values() for play in full)
            small = {"wrong: one more", "wrong: a tenth more", "wrong: another fraction"}
            near = {*passed} <= small and _NEAR.search(told)
            # Where no answer is negative, a grader that ignores the sign is seldom wrong.
            signs = {*passed} == {"wrong: negative"} and not any(
                re.search(r"(^|\s)-\d", play.turns[-1]["text"]) for play in self.by_policy["reference"] if play.turns
            )
            severity = "note" if near else "warning" if signs else "error"
            said = f"wrong answers in the right form earn full marks: {', '.join(list(passed)[:6])}"
            self.findings.add("wrong-answer-passes", severity, said, map_shown(full[0] for full in passed.values()))  # type: ignore[arg-type]

    def _of_agents_files(self) -> None:
        """Whether the reward takes what it expects from files that the agent may change, or leaves it beside others."""
        found = []
        for play in self.by_policy["emptied: the files of the prompt, before the reference begins"]:
            controls = [each for each in self.plays if each.policy.startswith("wrote: ") and each.item == play.item]
            written = set(map(_wrote, controls))
            found += [play] if len(written) == 1 and {_wrote(play)} != written and self.is_full(play) else []
        if found:
            said = f"other results earn full marks on {counted(len(found), 'item')} after the files of the prompt are "
            said += "emptied: the reward takes what it expects from the agent's own files"
            self.findings.add("cheat-passes", "error", said, map_shown(found))
        lying: dict[str, AuditPlay] = {}
        for play in self.by_policy["wrote: what the reference writes"]:
            for path in re.findall(r"\bsame ([\w./-]+)", " ".join(play.seen).replace("\\n", " ")):
                if path.rpartition("/")[2] not in play.words:  # it may have to be copied
                    lying[path] = play
        if lying:
            said = f"what the reference writes lies in the sandbox before it begins: {', '.join(list(lying)[:3])}"
            self.findings.add("solution-in-sandbox", "error", said, map_shown(lying.values()))
        for full in self._passing("printing: ").values():
            if full := [play for play in full if _has(play, "replaced ")]:
                said = "a program that prints the file beside its input earns full marks on "
                said += counted(len(full), "item")
                self.findings.add("solution-in-sandbox", "error", said, map_shown(full))

    def _repeating(self) -> None:
        """Whether a step of the reference pays again and again."""
        for name, full in self._passing("without call").items():
            said = f"the reference policy {name} earns full marks on {counted(len(full), 'item')}"
            self.findings.add("part-ignored", "warning" if len(full) < 2 else "error", said, map_shown(full))
        for full in self._passing("more: ").values():
            asked = " ".join(play.words for play in full)
            self.findings.add(
                "more-than-asked",
                "error" if _ONLY.search(asked) and len(full) > 1 else "note",
                f"calls that were not asked for cost nothing on {counted(len(full), 'item')}",
                map_shown(full),
            )
        self._limits()
        found, by_count = [], {}
        for name in self.by_policy:
            if match := re.match(r"repeat (\d): (.*)", name):
                by_count[match[2], int(match[1])] = self.by_policy[name][0].reward
        for name in [name for name in self.by_policy if name.startswith("repeat: ")]:
            play = self.by_policy[name][0]
            few = [by_count.get((name.removeprefix("repeat: "), count)) for count in range(3)]
            rewards = [reward for reward in (*few, play.reward) if reward is not None]
            if len(rewards) == 4 and rewards == sorted({*rewards}) and self.is_full(play):
                found.append(play)
        if found:
            play = max(found, key=lambda each: each.reward or 0.0)
            said = (
                f"a step pays again and again: {play.policy.removeprefix('repeat: ')} earns {play.reward:g}, the "
                f"reference policy {self.full.get(play.item, 1.0):g}"
            )
            self.findings.add("repeatable-reward", "error", said, map_shown(found))

    def _limits(self) -> None:
        """Whether a limit that texts name holds, and whether wrong answers before the right one cost something."""
        past = []
        for name, full in self._passing("over the limit").items():
            count = int(re.findall(r"\d+", name)[0])
            for play in full:
                seen = [re.sub(r"\d+", "#", text) for text in play.seen[:count]]
                calls = bool(play.turns[0]["calls"])
                # The same call is answered as at first. What a user says differs from one turn to the next.
                past += [play] if len(seen) == count and (not calls or seen[0] == seen[-1]) else []
        if past:
            said = (
                f"calls beyond the limit that texts name are answered, and cost nothing on {counted(len(past), 'item')}"
            )
            self.findings.add("limit-not-enforced", "error", said, map_shown(past))
        for full in self._passing("learner: ").values():
            said = f"what the agent reads after a wrong answer is the right one on {counted(len(full), 'item')}"
            self.findings.add("answer-in-tools", "error", said, map_shown(full))
        for full in self._passing("guesses: ").values():
            asked = " ".join(play.words for play in full)
            severity = "note" if re.search(r"attempt|guess|\btry\b|tries|again|hint", asked, re.I) else "error"
            said = f"wrong answers before the right one cost nothing on {counted(len(full), 'item')}"
            self.findings.add("guessing-passes", severity, said, map_shown(full))  # type: ignore[arg-type]

    def _numbers(self) -> None:
        """Rewards that stand for something else, and those of rollouts that say themselves that they failed."""
        rewards = Counter(play.reward for play in self.scored)
        for mask in MASKS:
            others = [abs(reward or 0.0) for reward in rewards if reward != mask]
            if mask in rewards and (not others or 10 * max([1.0, *others]) <= abs(mask)):
                found = [play for play in self.scored if play.reward == mask]
                said = f"the reward {mask:g} in {counted(len(found), 'rollout')}, others up to {max([0.0, *others]):g}"
                self.findings.add("sentinel-reward", "error", said, map_shown(found))
        bad = [play for play in self.plays if re.search(r"returned (-?inf|nan)|must be finite", play.reason)]
        if bad:
            said = f"{counted(len(bad), 'rollout')} got a reward that is no finite number: {bad[0].reason}"
            self.findings.add("sentinel-reward", "error", said, map_shown(bad))
        if self.facts.reward_range is not None:
            low, high = self.facts.reward_range
            out = [play for play in self.scored if not low <= (play.reward or 0.0) <= high]
            if out:
                said = f"{counted(len(out), 'rollout')} got a reward outside of the declared {low:g} to {high:g}"
                self.findings.add("reward-out-of-range", "error", said, map_shown(out))
        masked = [
            (play, name)
            for play in self.scored
            for name, value in play.metrics.items()
            if _MASKED.search(name.removeprefix("reward/")) and value == 1
        ]
        if masked:
            names = ", ".join(sorted({name for _, name in masked})[:3])
            evidence = [shown(play, f"{name} = 1") for play, name in masked]
            said = f"{counted(len(masked), 'rollout')} got a score, and a figure that says that it is none: {names}"
            self.findings.add("masked-score", "warning", said, evidence)

    def _vacuous(self) -> None:
        found = []
        for play in self.scored:
            output = "\n".join(play.outputs)
            none = _NOTHING_RAN.search(output) or (_SKIPPED.search(output) and not _PASSED.search(output))
            figure = next((name for name, value in play.metrics.items() if _TESTS_RUN.search(name) and value == 0), "")
            if (none or figure) and self.is_full(play):
                found.append(shown(play, f"{figure} = 0" if figure else output[-300:]))
        if found:
            said = f"{counted(len(found), 'rollout')} got full marks from a suite in which no test passed"
            self.findings.add("vacuous-pass", "error", said, found)

    def _alike(self) -> None:
        different = {play.reward for play in self.scored}
        policies = {play.policy for play in self.scored}
        reference = bool(self.by_policy["reference"])
        if len(different) == 1 and len(policies) > 1 and (different != {0.0} or reference):
            value = different.pop()
            said = f"the reward is always {value:g}: nothing can be learned from it"
            self.findings.add("reward-never-differs", "error", said, map_shown(self.scored[:2]))

    def _labels(self) -> None:
        """Whether one answer is right for most items."""
        said = [play.turns[-1]["text"] for play in (*self.by_policy["reference"], *self.further) if play.turns]
        called = any(play.called for play in self.by_policy["reference"])
        forms = [form_of(text) for text in said] if not called else []
        answers = Counter(form.core.casefold() for form in forms if form is not None)
        count = answers.total()
        if len(answers) > 1 and count >= 12 and 5 * answers.most_common(1)[0][1] >= 3 * count:
            answer, most = answers.most_common(1)[0]
            severity = "error" if 5 * most >= 4 * count else "warning"
            text = f"the answer {answer!r} is right for {most} of {counted(count, 'item')}"
            self.findings.add("constant-answer", severity, text, [{"text": answer}])  # type: ignore[arg-type]

    def _looks(self) -> None:
        looks = sorted({look for play in self.plays for look in play.looks if not asked_for(look, play.words)})
        if looks:
            said = f"the reward reads in the agent's own sandbox: {', '.join(looks[:3])}"
            self.findings.add("reads-agents-files", "note", said)


def _has(play: AuditPlay, text: str) -> bool:
    return any(text in seen for seen in play.seen)


def _wrote(play: AuditPlay) -> str:
    """The digests of the files that were written in a play."""
    return " ".join(sorted(digest for seen in play.seen for digest in re.findall(r"wrote (\w{64}) ", seen)))
