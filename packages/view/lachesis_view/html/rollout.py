"""A rollout as pages show it, from the record of its group: conversation, branches, failed calls, the reward's calls.

`rollout_macros.html.jinja` draws it, in the viewer and in the report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson

from lachesis_messages.records.groups import stored_messages
from lachesis_view.html import figure, pretty
from lachesis_view.html.message_graph import Branch, branches_of, drawing, rows_of

_NOT_RECORDED: dict[str, Any] = dict.fromkeys(
    ("anchor", "turn", "label", "context", "of", "exit_code", "span", "step_in", "text_same", "reasoning_same")
)
"""What only `rollout_view` and those who call it know of a message."""
ANSWERED = "the model answered"
"""The reason of a rollout that came to its end, which its outcome says already."""
COMPONENT = "reward/"
TITLE_LENGTH = 110
_MARKS = re.compile(r"<[|｜][^<>]{1,40}[|｜]>|<(?:start|end)_of_turn>|</?s>|\[/?INST\]")
"""Tokens between the messages of a prompt."""
HEADLINE = re.compile(r"(?m)^(.+)\n(?=Traceback \(most recent call last\):\n(?:.*\n)*?\1$)")  # which it ends with, too
_IMAGES = ("data:image/png;", "data:image/jpeg;", "data:image/gif;", "data:image/webp;")


def rollout_view(group: Mapping[str, Any], rollout: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values for the macros, for one of the group's rollouts. Records of older versions lack some.

    The ids of messages begin with `prefix`: a page may hold several rollouts.
    """
    branches = branches_of(rollout, stored_messages(group, rollout))
    shown = [_branch_view(branch, rollout, prefix) for branch in branches]
    rows = list(rows_of(branches[0])) if len(branches) > 1 else []
    figures = {name: figure(value) for name, value in (rollout.get("metrics") or {}).items()}
    return {
        "rollout": rollout,
        "traceback": (trace := HEADLINE.sub("", str(rollout.get("traceback") or ""))),
        "reason": "" if (said := str(rollout.get("reason") or "")) in trace or said == ANSWERED else said,
        "line": " · ".join(f"{name} {value}" for name, value in figures.items()),
        "rewards": _rewards(rollout),
        "metrics": {name: value for name, value in figures.items() if not name.startswith(COMPONENT)},
        "branches": shown,
        "failed": [
            call for branch in shown for message in branch["messages"] for call in message["calls"] if call["failed"]
        ],
        "log": [_row_view(row.branch, row.place, shown) for row in rows],
        "graph": drawing(rows),
        "edits": [_timed(edit) for edit in rollout.get("context_edits") or ()],
    }


def _rewards(rollout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The components of the reward, then what else used the sandbox: `name`, `value` and `weight` in the sum, or None,
    and its `calls`. Records of older versions do not say whose calls they are: these have no name."""
    calls: dict[str, list[dict[str, Any]]] = {}
    for call in rollout.get("reward_calls") or ():
        calls.setdefault(str(call.get("reward") or ""), []).append(_timed(call))
    values = {str(name): value for name, value in (rollout.get("metrics") or {}).items()}
    weights = rollout.get("reward_weights") or {}
    rows = [
        {"name": name, "value": value, "weight": weights.get(name), "calls": calls.pop(name, [])}
        for name, value in ((each[len(COMPONENT) :], values[each]) for each in values if each.startswith(COMPONENT))
    ]
    return rows + [{"name": name, "value": None, "weight": None, "calls": of} for name, of in calls.items()]


def inherited_turns(rollout: Mapping[str, Any]) -> int:
    """How many turns of another rollout it begins with; its own completions are numbered from 0 in records."""
    if not rollout.get("tree"):
        return 0
    from lachesis_messages.records.tree_places import TreePlace  # late: few runs have trees

    place = TreePlace.from_record(rollout["tree"])
    return place.turns[place.first_own]


def title_of(item: Any, messages: Iterable[Mapping[str, Any]]) -> str:
    """The beginning of what the user asked. Some environments ask the same of every item: where no longer text of the
    item is in it, short values of the item follow on a second line, with their names: one may be the answer."""
    first = next((message for message in messages if message["role"] in ("user", "context")), None)
    asked = "".join(texts_of(first.get("content"))) if first else ""
    if first and first["role"] == "context":  # a prompt as it was decoded: the question is what is said last
        said = next((part for part in reversed(_MARKS.split(asked)) if len(part.split()) > 1), asked)
        asked = said.removeprefix("user\n")
    values = item if isinstance(item, Mapping) else {"": item}
    differs = any(isinstance(one, str) and len(one) > TITLE_LENGTH // 8 and one in asked for one in values.values())
    shown = {} if differs else {str(name)[:TITLE_LENGTH]: _short(value, asked) for name, value in values.items()}
    own = [": ".join(filter(None, (" ".join(name.split()), value))) for name, value in shown.items() if value]
    more = _cut(" · ".join(own), TITLE_LENGTH // 2)
    text = _cut(" ".join(asked[: 8 * TITLE_LENGTH].split()), TITLE_LENGTH - len(more) - bool(more))
    return "\n".join(filter(None, (text, more)))


def _short(value: Any, asked: str) -> str:
    parts = (value if isinstance(value, list) else [value])[:8]
    texts = [each[:TITLE_LENGTH] for each in parts if isinstance(each, str)]
    texts += [str(each) for each in parts if type(each) is int and abs(each) < 1 << 53]
    text = " ".join(", ".join(texts).split())
    return text if len(text) <= TITLE_LENGTH // 2 and not all(each in asked for each in texts) else ""


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def texts_of(content: Any) -> Iterator[str]:
    """The texts of a message's content: it is one, or a list of parts of which some have one."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def last_words(group: Mapping[str, Any], rollout: Mapping[str, Any]) -> str:
    """Why a rollout has no score, in a line: what its error says, or what ended it early; may be empty."""
    traceback = rollout.get("traceback") or group.get("traceback")
    if traceback:
        lines = traceback.strip().splitlines()
        return str(lines[-1 if lines[0].startswith("Traceback") else 0])
    return "" if rollout["outcome"] == "completed" else str(rollout["reason"])


def _branch_view(branch: Branch, rollout: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    errors: dict[tuple[str, str], str] = {}
    for each in rollout.get("tool_errors") or ():
        key, error = (str(each.get("tool")), str(each.get("arguments"))), each.get("error") or ""
        errors[key] = error if errors.get(key, error) == error else ""  # what each call said is in its answer
    messages = []
    inherited = inherited_turns(rollout)
    calls: dict[Any, dict[str, Any]] = {}
    for place, message in enumerate(branch.messages):
        turn = branch.turns[place] if place < len(branch.turns) else None
        view = message_view(message)
        view["anchor"] = anchor = prefix + branch.anchor(place)
        view["turn"], view["label"] = turn, None if turn is None else turn + inherited
        for call in view["calls"]:
            known = branch.calls.get(call["id"]) or {}
            # Records of older versions name failed calls by what was called.
            asked = call["name"], str(call["arguments"])
            failed = bool(known.get("failed")) if known else asked in errors
            call |= {"took": _took(known), "failed": failed, "repaired": known.get("repaired"), "anchor": anchor}
            call["seconds"] = known.get("seconds")
            call["reason"] = short_line(errors.get(asked)) if failed else ""
            calls[call["id"]] = call
        if view["role"] == "assistant":
            view["context"] = turn is None
        elif view["call_id"] is not None:
            view["of"] = calls.get(view["call_id"])
            view["exit_code"] = _exit_code(message.get("content"))
            if (of := view["of"]) and of["failed"] and not of["reason"]:
                of["reason"] = short_line(view["text"])
        messages.append(view)
    return {"kind": branch.kind, "reason": branch.reason, "messages": messages}


def message_view(message: Any) -> dict[str, Any]:
    """The texts of a message, and its images. Environments of others send what they like as messages."""
    if not isinstance(message, Mapping):
        message = {"role": "unknown", "content": message}
    text, images = _content(message.get("content"))
    reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
    return {
        "role": str(message.get("role")),
        "name": message.get("name") or "",
        "call_id": message.get("tool_call_id"),
        "reasoning": reasoning if isinstance(reasoning, str) else pretty(reasoning),
        "text": pretty(text) if message.get("role") == "tool" else text,
        "images": images,
        "calls": [_call_view(call) for call in message.get("tool_calls") or ()],
        **_NOT_RECORDED,
    }


def _content(content: Any) -> tuple[str, list[str]]:
    """The text of a message's content, and the data URLs of its pixels; other parts are shown as JSON."""
    if isinstance(content, str | None):
        return content or "", []
    texts, images = [], []
    for part in content if isinstance(content, list) else [content]:
        of = part if isinstance(part, Mapping) else {}
        image = of.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if isinstance(url, str) and url.startswith(_IMAGES):
            images.append(url)
        else:
            texts.append(str(of["text"]) if of.get("type") == "text" and "text" in of else pretty(part))
    return "\n".join(texts), images


def _call_view(call: Any) -> dict[str, Any]:
    known = call if isinstance(call, Mapping) else {}
    function = known.get("function")
    if not isinstance(function, Mapping):
        function = {"name": "unknown", "arguments": call}
    arguments = function.get("arguments")
    return {
        "id": known.get("id"),
        "name": str(function.get("name")),
        "arguments": arguments,
        "shown": pretty(arguments),
        "took": "",
        "failed": False,
        "reason": "",
        **dict.fromkeys(("seconds", "repaired")),
    }


def _timed(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, "took": _took(record)}


def short_line(text: Any, length: int = 200) -> str:
    """The beginning of a text, in one line."""
    return _cut(" ".join(str(text or "")[: 8 * length].split()), length)


def _took(record: Mapping[str, Any]) -> str:
    seconds = record.get("seconds")
    return "" if seconds is None else f"{seconds:.2f} s" if seconds >= 0.01 else "<0.01 s"


def _exit_code(content: Any) -> int | None:
    """That of the command whose output a tool message is."""
    if not isinstance(content, str) or '"exit_code"' not in content:
        return None
    with suppress(orjson.JSONDecodeError):
        if isinstance(found := orjson.loads(content), dict) and isinstance(code := found.get("exit_code"), int):
            return code
    return None


def _row_view(branch: Branch, place: int | None, shown: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    messages = shown[branch.number]["messages"]
    if place is None:
        anchor = messages[0]["anchor"] if messages else ""
        return {"kind": branch.kind, "head": True, "text": branch.reason, "anchor": anchor, "role": ""}
    message = messages[place]
    calls = ", ".join(call["name"] for call in message["calls"])
    text = " ".join((message["text"] or message["reasoning"]).split())[:160]
    return {
        "kind": branch.kind,
        "role": message["role"],
        "turn": message["label"],
        "failed": bool(message["of"] and message["of"]["failed"]),
        "context": message["context"],
        "text": f"calls {calls} {text}".rstrip() if calls else text,
        "anchor": message["anchor"],
    }


def tool_views(group: Mapping[str, Any]) -> list[dict[str, str]]:
    """The tools of the group's agents: name, description and the JSON of their parameters."""
    functions = [tool.get("function") or tool for tool in group.get("tools") or ()]
    return [
        {
            "name": str(function.get("name", "")),
            "description": str(function.get("description", "")),
            "parameters": json.dumps(function.get("parameters"), indent=2, ensure_ascii=False),
        }
        for function in functions
    ]
