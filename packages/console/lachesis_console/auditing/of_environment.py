"""Findings about prompts, tools, exceptions, the network, time and memory."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from backends.text import counted
from lachesis_console.auditing.findings import Findings
from lachesis_console.auditing.forms import form_of
from lachesis_console.auditing.of_rewards import Rewards
from lachesis_console.auditing.records import AuditPlay, EnvironmentFacts, map_shown, shortened, shown
from lachesis_tools import BUILTIN_TOOLS

SLOW_SETUP, SLOW_SANDBOX, SLOW_ROLLOUT = 30.0, 5.0, 60.0
"""Seconds."""
LARGE, GROWTH = 4096.0, 20.0
"""MiB of all processes, and of each rollout more than the one before."""
SECOND = ("fresh", "fresh again", "reversed", "interleaved")
"""Blocks of the second start."""
LEFT_OPEN = 0.4
"""Open files, threads and processes by which each rollout has more than the one before."""
_PLACEHOLDER = re.compile(
    r"\{\{ ?[\w.]+ ?\}\}|<[\w.]+ object at 0x[0-9a-f]+>|<(?:generator|function|coroutine) \w|\$\{\w+\}"
)
_BROKEN = re.compile(
    r"NotImplemented|AttributeError|NameError|TypeError|ImportError|ModuleNotFound|unexpected keyword"
    r"|HTTP (404|405|50\d)|[Uu]nknown tool|no such tool|has no attribute|not callable|UnboundLocal"
)
_COMMANDS = ("terminal", "python")
"""Tools whose first call of a reference policy is a program."""
_NAMED = r"(answer|solution|expected|result|label|target|truth|correct)\b[^.\n]{0,15}?(is|=|:)\s*\W{0,6}"


_REVEALED = (
    r"\b(((correct|expected|right|true|actual)( \w+)?|answer|solution|secret|password|code|target|number|word)"
    r"[^.\n\w]{0,3} ?(is|was|=|:)|expected|wanted|it was)\s*\W{0,6}"
)
"""What comes before an answer that a tool gives away."""


def judge_environment(
    plays: Sequence[AuditPlay],
    facts: EnvironmentFacts,
    network: Sequence[Mapping[str, Any]],
    rewards: Rewards,
    *,
    context: int,
) -> None:
    findings = rewards.findings
    _exceptions(plays, findings)
    plays = [play for play in plays if play.block != "further"]
    _prompts(plays, facts, findings, context)
    _answers(plays, facts, findings)
    _unshown(plays, facts, findings)
    _evaluation(facts, findings)
    _tools(plays, facts, findings)
    _network(plays, facts, network, findings, rewards)
    _costs(plays, facts, findings)


def _prompts(plays: Sequence[AuditPlay], facts: EnvironmentFacts, findings: Findings, context: int) -> None:
    prompts = {play.item: play for play in reversed(plays) if play.turns}
    empty = [play for play in prompts.values() if not play.prompt.strip()]
    if empty:
        findings.add("empty-prompt", "error", f"the prompt of {counted(len(empty), 'item')} is empty", map_shown(empty))
    long = [play for play in prompts.values() if play.prompt_length / 4 > context]
    if long:
        most = max(play.prompt_length for play in long)
        said = f"{counted(len(long), 'prompt')} with {most} characters, about {most // 4} tokens, more than {context}"
        findings.add("long-prompt", "warning", said, [shown(play, play.prompt[:200]) for play in long])
    if facts.cut:
        most = 4 * len(facts.cut) >= len(facts.scanned) and len(facts.cut) > 1
        said = f"{counted(len(facts.cut), 'prompt')} of {len(facts.scanned)} end within a text"
        findings.add("prompt-cut", "error" if most else "warning", said, [{"text": text} for text in facts.cut])
    if facts.not_offered:
        many = 4 * len(facts.not_offered) >= len(facts.scanned)
        said = f"the answer of {counted(len(facts.not_offered), 'item')} is not among its choices"
        findings.add(
            "not-offered", "error" if many else "warning", said, [{"text": text} for text in facts.not_offered]
        )
    odd = [shown(play, found[0]) for play in prompts.values() if (found := _PLACEHOLDER.search(play.prompt))]
    if odd:
        findings.add("placeholder-in-prompt", "warning", f"{counted(len(odd), 'prompt')} show a placeholder", odd)
    texts = [" ".join(prompts[item].prompt.split()) for item in sorted(prompts)]
    rows = [(facts.digests[item], text) for item, text in zip(sorted(prompts), texts, strict=True)]
    rows += [(digest, " ".join(prompt.split())) for digest, _, prompt in facts.scanned[len(facts.digests) :] if prompt]
    digests = [digest for digest, _ in rows]
    cycle = next((at for at in range(1, len(digests)) if digests[at:] == digests[: len(digests) - at]), len(digests))
    by_text: dict[str, list[int]] = defaultdict(list)
    for at, (_, text) in enumerate(rows[:cycle]):
        by_text[text].append(at)
    same = {text: places for text, places in by_text.items() if len(places) > 1}
    right = {play.item: play.turns for play in plays if (play.policy, play.block) == ("reference", "first")}
    ends = [{json.dumps(right[at]) for at in places if at in right} for places in same.values()]
    if not facts.has_turns and any(len(each) > 1 for each in ends):
        said = "items with equal prompts have different right answers: the prompt lacks what decides"
        findings.add("prompts-alike", "error", said)
    more = sum(len(places) - 1 for places in same.values())
    if not same:
        near = Counter(re.sub(r"\d+", "#", text.lower()) for text in by_text)
        count = sum(each - 1 for each in near.values())
        if count and not facts.prepares:  # the sandboxes of such items differ
            findings.add("duplicates", "note", f"{count} of {len(by_text)} prompts differ from another in numbers only")
    elif len(by_text) == 1 or any(len({digests[at] for at in places}) > 1 for places in same.values()):
        code, severity = ("prompts-alike", "note") if facts.has_turns else ("duplicates", "warning")
        if not (facts.has_turns and facts.prepares):
            said = f"{more} of {cycle} items share their prompt with another item"
            findings.add(code, severity, said)  # type: ignore[arg-type]
    else:
        evidence = [{"item": places[0], "text": f"as {places[1:4]}: {text[:200]}"} for text, places in same.items()]
        severity = "warning" if 4 * more > cycle else "note"  # random items come again now and then
        if not facts.has_turns and cycle >= 12 and 4 * more >= 3 * cycle:
            severity = "error"
        said = f"{more} of {cycle} items are the same as an earlier one"
        findings.add("duplicates", severity, said, evidence)  # type: ignore[arg-type]


def _evaluation(facts: EnvironmentFacts, findings: Findings) -> None:
    """Whether evaluation items are among those of training."""
    contents = {content for _, content, _ in facts.scanned if content}
    texts = [re.sub(r"\W+", " ", prompt.casefold()) for _, _, prompt in facts.scanned if prompt]
    telling = {*texts} if 2 * len({*texts}) > len(texts) else set()
    """Prompts, unless the items differ in what is hidden."""
    both = [
        {"item": at, "text": prompt[:200]}
        for at, (_, content, prompt) in enumerate(facts.evaluation)
        if content in contents or re.sub(r"\W+", " ", prompt.casefold()) in telling
    ]
    if both:
        count = len(facts.evaluation)
        said = f"{len(both)} of {counted(count, 'evaluation item')} are among {len(facts.scanned)} items of training"
        severity = "error" if 10 * len(both) >= count else "warning"
        if contents and contents <= {content for _, content, _ in facts.evaluation}:
            # A set of tasks that is for one or the other, and no split that failed.
            severity, said = "note", f"{said}, which are the same set: name another one for one of them"
        findings.add("evaluation-in-training", severity, said, both)  # type: ignore[arg-type]


def _answers(plays: Sequence[AuditPlay], facts: EnvironmentFacts, findings: Findings) -> None:
    """Whether prompts say the answer."""
    found = []
    said = {play.item: play for play in plays if (play.policy, play.block) == ("reference", "first") and play.turns}
    prompts = {play.item: play.words for play in plays if play.prompt}
    shown_by: dict[int, dict[str, Any]] = {}
    for item, prompt in prompts.items():
        last = said[item].turns[-1]["text"].strip() if item in said else ""
        form = form_of(last)
        answers = {facts.answers[item], last, form.core if form is not None else ""}
        secrets = [form.core] if form is not None and not facts.answers[item] else [facts.answers[item]]
        cores = "|".join(re.escape(each) for each in (*secrets, *facts.secrets[item]) if each)
        # What right steps show is no answer to a wrong one after them.
        right = {text for play in plays if (play.policy, play.item) == ("reference", item) for text in play.seen}
        for play in plays if cores else ():
            wrong = play.item == item and play.policy.startswith(("random", "every tool", "nothing", "noise", "wrong"))
            after = play.seen if not play.policy.startswith("wrong") else [t for t in play.seen if t not in right]
            seen = "\n".join(after) if wrong else ""
            if match := re.search(rf"{_REVEALED}({cores})(?!\w)", seen, re.IGNORECASE):
                shown_by.setdefault(item, shown(play, match[0]))
        for answer in (each for each in answers if 0 < len(each) < 200 and each != "Done."):
            if match := re.search(_NAMED + re.escape(answer) + r"(?!\w)", prompt, re.IGNORECASE):
                found.append({"item": item, "policy": "", "reward": None, "text": match[0]})
                break
    if shown_by:
        severity = "error" if 2 * len(shown_by) >= len(prompts) else "warning"
        said_of = f"what the agent reads after a wrong step names the answer of {counted(len(shown_by), 'item')}"
        findings.add("answer-in-tools", severity, said_of, list(shown_by.values()))  # type: ignore[arg-type]
    if len(found) >= 2 or (found and len(prompts) < 3):
        share = len(found) / len(prompts)
        severity = "error" if share >= 0.5 else "note"
        said_of = f"the prompt names the answer of {len(found)} of {counted(len(prompts), 'item')}"
        findings.add("answer-in-prompt", severity, said_of, found)  # type: ignore[arg-type]


def _unshown(plays: Sequence[AuditPlay], facts: EnvironmentFacts, findings: Findings) -> None:
    """Whether the reference policy's first command holds a value of the item that the agent was not shown."""
    found = []
    for play in plays:
        first = next((turn["calls"][0] for turn in play.turns if turn["calls"]), {"name": ""})
        if (play.policy, play.block) != ("reference", "first") or first["name"] not in _COMMANDS:
            continue
        command, known = first["arguments"], play.told + facts.answers[play.item]
        held = (
            value
            for value in facts.secrets[play.item]
            if value not in known
            and len(command) > 40 + len(value)
            and re.search(rf"(?<![\w.]){re.escape(value)}(?![\w.])", command)
        )
        if value := next(held, ""):
            found.append(shown(play, f"{value} in {shortened(command, 200)}"))
    if len(found) > 1 and 2 * len(found) >= len(facts.digests):
        said = (
            f"the reference policy's first command holds what the agent is not shown on {counted(len(found), 'item')}"
        )
        findings.add("unshown-value", "warning", said, found)


def _tools(plays: Sequence[AuditPlay], facts: EnvironmentFacts, findings: Findings) -> None:
    problems: dict[str, str] = {}
    for tools in facts.tools:
        names = Counter(tool["function"]["name"] for tool in tools)
        for tool in tools:
            function = tool["function"]
            name, schema = function["name"], function.get("parameters")
            if problem := _schema_problem(schema):
                problems[name] = problem
            elif not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
                problems[name] = "models cannot call a tool of this name"
            elif names[name] > 1:
                problems[name] = "two tools have this name"
    for name, problem in problems.items():
        findings.add("tool-schema", "error", f"the tool {name}: {problem}", [{"text": problem}])
    schemas: dict[str, str] = {}
    called: Counter[str] = Counter()
    failed: dict[str, list[dict[str, Any]]] = defaultdict(list)
    works: set[str] = set()
    for play in plays:
        if play.policy == "reference":
            works.update(Counter(play.called) - Counter(name for name, *_ in play.tool_errors))
            for call in (call for turn in play.turns for call in turn["calls"]):
                if problem := _beside(call, facts.tools[play.item]):
                    schemas[call["name"]] = problem
        if play.policy.startswith(("random", "every tool")):
            called.update(play.called)
            for name, arguments, error in play.tool_errors:
                failed[name].append(shown(play, f"{name}({arguments}): {error}"))
    for name, problem in schemas.items():
        findings.add("tool-schema", "error", f"the tool {name}: {problem}", [{"text": problem}])
    for name, errors in failed.items():
        if name in works or len(errors) < called[name] or len(errors) < 2:
            continue
        broken = any(_BROKEN.search(error["text"]) or _missing_key(error["text"]) for error in errors)
        if name in BUILTIN_TOOLS and not broken:
            continue  # random arguments, such as a process that nobody has started
        said = f"the tool {name} failed in each of {counted(len(errors), 'call')} with valid arguments"
        findings.add("tool-fails", "error" if broken else "note", said, errors)


def _beside(call: Mapping[str, str], tools: Sequence[Mapping[str, Any]]) -> str:
    """Arguments of the reference policy that the schema of the tool does not have."""
    schema = next((t["function"].get("parameters") or {} for t in tools if t["function"]["name"] == call["name"]), {})
    known = schema.get("properties")
    try:
        given = json.loads(call["arguments"] or "{}")
    except ValueError:
        return ""
    if not known or schema.get("additionalProperties") or not isinstance(given, dict):
        return ""
    more = [name for name in given if name not in known]
    return f"the reference policy gives {', '.join(more)}, which its schema does not have" if more else ""


def _missing_key(text: str) -> bool:
    """Whether a tool reads an argument that it was not given."""
    found = re.search(r"KeyError: ?\(?'(\w+)'", text)
    return found is not None and f"{found[1]}" not in text[: found.start()]


def _schema_problem(schema: Any, *, top: bool = True) -> str:
    """What is wrong with a JSON schema, as far as models' servers refuse it; empty where it is right."""
    if not isinstance(schema, Mapping):
        return "" if schema is None and top else f"its schema is {schema!r:.60}, not an object"
    kinds = schema.get("type")
    known = {"object", "array", "string", "integer", "number", "boolean", "null"}
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind is not None and kind not in known:
            return f"the schema has the type {kind!r}, which JSON Schema does not have"
    if top and kinds not in (None, "object"):
        return f"the schema of its parameters is of the type {kinds!r}, not 'object'"
    properties = schema.get("properties") or {}
    if not isinstance(properties, Mapping):
        return f"properties is {properties!r:.60}, not an object"
    required = schema.get("required") or []
    if not isinstance(required, list):
        return f"required is {required!r:.60}, not a list of names"
    # An object inside may say what it requires and no more.
    if missing := [name for name in required if name not in properties and (top or properties)]:
        return f"it requires {', '.join(map(str, missing))}, which properties does not have"
    parts = [*properties.values(), *([schema["items"]] if isinstance(schema.get("items"), Mapping) else [])]
    return next(filter(None, (_schema_problem(each, top=False) for each in parts)), "")


def _exceptions(plays: Sequence[AuditPlay], findings: Findings) -> None:
    by_reason: dict[tuple[str, str], list[AuditPlay]] = defaultdict(list)
    for play in plays:
        if play.fault:
            by_reason["fault", play.fault].append(play)
        elif play.kind:
            by_reason[play.kind, play.reason].append(play)
    for (kind, reason), found in by_reason.items():
        odd = all(
            play.policy.startswith(("noise", "answer", "garbage", "echo", "cheat", "wrong", "more")) for play in found
        )
        policies = {play.policy for play in found}
        who = found[0].policy if len(policies) == 1 else f"{len(policies)} policies"
        said = f"{who}: {counted(len(found), 'rollout')} without a score: {reason}"
        evidence = [shown(play, play.traceback[-300:]) for play in found]
        if kind == "fault":
            said = f"the reward raised in {counted(len(found), 'rollout')}, scored as the agent's fault: {reason}"
            findings.add("exception-on-odd-input", "warning", said, map_shown(found))
        elif kind == "environment":
            code = "exception-on-odd-input" if odd else "exception"
            findings.add(code, "warning" if odd else "error", said, evidence)
        elif kind == "too_slow":
            findings.add("too-slow", "error", said, evidence)
        elif kind in ("infra_error", "model_server", "broken_item"):
            # A reference policy may raise where its own answer is replaced by another one.
            of_reference = "the policy failed" in reason and all(play.policy != "reference" for play in found)
            if found[0].block != "no network" and not of_reference:
                findings.add("infrastructure", "error", said, evidence)
        elif kind != "timeout":
            reference = any(play.policy == "reference" for play in found)
            unread = [play for play in plays if play.policy.startswith(("garbage", "answer"))]
            at_will = kind == "declined" and len(unread) > 3 and all(play.kind == kind for play in unread)
            if at_will and any(play.reward for play in plays):
                said = f"an answer that cannot be read has no score, so that an agent can choose to have none: {reason}"
            findings.add("unscored", "error" if reference or at_will else "note", said, map_shown(found))


def _network(
    plays: Sequence[AuditPlay],
    facts: EnvironmentFacts,
    network: Sequence[Mapping[str, Any]],
    findings: Findings,
    rewards: Rewards,
) -> None:
    at_start = [each for each in network if each["time"] < facts.started]
    later = [each for each in network if each["time"] >= facts.started]
    phases = ((at_start, "network-at-start", "when it starts"), (later, "network-in-rollout", "in rollouts"))
    for found, code, when in phases:
        if found:
            said = f"it uses the network {when}: {', '.join(sorted({each['what'] for each in found})[:5])}"
            findings.add(code, "warning", said, [{"text": f"{each['event']} {each['what']}"} for each in found])
    for play in plays:
        if play.block == "no network" and play.reward is not None:
            refused = [each for each in later if each["refused"] and play.began <= each["time"]]
            known = [each.reward for each in rewards.by_policy[play.policy] if each.item == play.item]
            best = max([1.0 if rewards.usual else 0.0, *(each for each in known if each is not None)])
            if refused and play.reward < best:
                said = f"the network was refused ({refused[0]['what']}), and the rollout got the score {play.reward:g}"
                findings.add("failure-as-score", "error", said, [shown(play)])


def _costs(plays: Sequence[AuditPlay], facts: EnvironmentFacts, findings: Findings) -> None:
    for name, limit in (("setup", SLOW_SETUP), ("setup_sandbox", SLOW_SANDBOX)):
        if (seconds := facts.setup.get(name, 0.0)) > limit:
            findings.add("slow-setup", "warning", f"{name}() took {seconds:.1f} s")
    if not plays:
        return
    usual = median(play.seconds for play in plays)
    if usual > SLOW_ROLLOUT:
        findings.add("slow", "warning", f"half of the rollouts took more than {usual:.1f} s")
    slow = [play for play in plays if play.seconds > max(5.0, 10 * usual) and play.kind != "too_slow"]
    if slow:
        most = max(play.seconds for play in slow)
        said = f"{counted(len(slow), 'rollout')} took up to {most:.1f} s, where half take {usual:.2f} s or less"
        findings.add("slow", "note", said, map_shown(slow))
    peak = max(play.memory for play in plays)
    plays = [play for play in plays if play.block not in SECOND]
    if (rise := _rise([play.memory for play in plays])) > GROWTH:
        said = f"memory grows by {rise:.0f} MiB or more a rollout, to {peak:.0f} MiB"
        findings.add("memory", "error", said)
    if (rise := _rise([play.held for play in plays])) > LEFT_OPEN:
        most = max(play.held for play in plays)
        said = f"each rollout leaves {rise:.2g} open files, threads or processes behind, {most} at most"
        findings.add("left-open", "error", said)
    elif peak > LARGE:
        findings.add("memory", "warning", f"its processes take up to {peak:.0f} MiB")


def _rise(values: Sequence[float]) -> float:
    """The mean growth from one rollout to the next, of the half of the rollouts where it is smaller."""
    growth = [after - before for before, after in itertools.pairwise(values)]
    half = len(values) // 2
    return min(sum(growth[:half]) / max(1, half), sum(growth[half:]) / max(1, len(growth) - half))
