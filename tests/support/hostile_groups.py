"""A group whose every text attacks the page that shows it, with all that the record of a rollout can hold."""

from __future__ import annotations

import json
from typing import Any

from tests.support.pictures import image, text

HOSTILE = (
    "</pre><script>alert('x')</script>\"'><img src=http://evil.example/x onerror=alert(1)> {{ 7*7 }} ünï 😀 \u202e"
)
SHOWN = HOSTILE.replace("\u202e", "\\u{202e}")
MARKS = (
    *("ROLE", "SYSTEM", "PROMPT", "ANSWER", "THOUGHT", "TOOL", "ARGUMENT", "RESULT", "INNER", "REASON", "DROPPED"),
    *(
        "REPAIR",
        "METHOD",
        "GIVEN",
        "OUTPUT",
        "RAISED",
        "JUDGE",
        "FAULT",
        "PART",
        "METRIC",
        "EDIT",
        "PROGRAM",
        "STDOUT",
        "+DIFF",
    ),
)
"""What comes before `HOSTILE` in the texts of a rollout, one for each place."""


def hostile_group(key: str = "k-1") -> dict[str, Any]:
    """Two rollouts with a picture, a failed call, its sub-agent, an attempt, edits, the reward's calls, a verifier."""
    function = {"name": f"TOOL {HOSTILE}", "arguments": json.dumps({"code": f"ARGUMENT {HOSTILE}"})}
    elsewhere = {"type": "image_url", "image_url": {"url": f"https://evil.example/{HOSTILE}"}}
    result = {"output": f"RESULT {HOSTILE}", "exit_code": 3, "error": None}
    messages = [
        {"role": f"ROLE {HOSTILE}", "content": f"SYSTEM {HOSTILE}"},
        {"role": "user", "content": [text(f"PROMPT {HOSTILE}"), image(1, 1), elsewhere]},
        {
            "role": "assistant",
            "content": f"ANSWER {HOSTILE}",
            "reasoning": f"THOUGHT {HOSTILE}",
            "tool_calls": [{"id": "c1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": json.dumps(result)},
        {"role": "assistant", "content": "Done."},
    ]
    chat = {"messages": [{"role": "user", "content": f"INNER {HOSTILE}"}], "calls": {}, "discarded": []}
    attempt = {
        "reason": f"REASON {HOSTILE}",
        "at": 2,
        "attempt": True,
        "edit": False,
        "after": [-1, 1],
        "messages": [{"role": "assistant", "content": f"DROPPED {HOSTILE}"}],
        "message_turns": [0],
    }
    did = {"method": f"METHOD {HOSTILE}", "arguments": [f"GIVEN {HOSTILE}", "-l"], "seconds": 0.25, "exit_code": 2}
    edit = {"turn": 1, "tokens_before": 90, "tokens_after": 30, "messages": 2, "seconds": 0.5, "at": 1, "by": HOSTILE}
    rollout = {
        **dict.fromkeys(("index", "turns", "tool_calls", "seconds"), 1),
        "rollout_id": HOSTILE,
        "reward": 0.5,
        "traceback": f"JUDGE {HOSTILE}",
        "place": None,
        "messages": messages,
        "message_turns": [None, None, 1, None, 2],
        "calls": {"c1": {"seconds": 1.5, "failed": True, "repaired": f"REPAIR {HOSTILE}", "subagent": chat}},
        "outcome": "completed",
        "reason": HOSTILE,
        "agent_fault": f"FAULT {HOSTILE}",
        "metrics": {f"reward/PART {HOSTILE}": 1.0, f"METRIC {HOSTILE}": 2.0},
        "reward_calls": [{**did, "output": f"OUTPUT {HOSTILE}", "error": f"RAISED {HOSTILE}"}],
        "context_edits": [{**edit, "error": f"EDIT {HOSTILE}"}, {**edit, "error": None}],
        "tool_stats": {},
        "tool_errors": [],
        "discarded": [attempt],
        "program": {"command": f"PROGRAM {HOSTILE}"},
        "verifier": {"stdout": f"STDOUT {HOSTILE}", "diff": f"@@\n-old\n+DIFF {HOSTILE}", "grading": "seal"},
    }
    described = {"name": f"NAMED {HOSTILE}", "description": f"SAYS {HOSTILE}", "parameters": {HOSTILE: 1}}
    return {
        "environment": "hostile",
        "model": HOSTILE,
        "category": HOSTILE,
        "item_key": key,
        "item": {"kind": f"ITEM {HOSTILE}", "more": [1]},
        "messages": [],
        "tools": [{"type": "function", "function": described}],
        "samples": [{"rollout_id": "of another"}],
        "rollouts": [rollout, {**rollout, "reward": None, "unscored_kind": "declined", "index": 2}],
    }
