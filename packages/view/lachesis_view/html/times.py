"""Where the time of a rollout went, turn by turn, from its record.

A record holds how long things took, not when they began: bars follow each other in the order of sampling, those of a
sub-agent from where its call begins. Calls of one turn follow each other too, though some ran at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def time_view(rollout: Mapping[str, Any], branches: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The values for the drawing, from the branches of `rollout_view`; None where the record has no times and tokens.

    `rows` are turns: `label`, `anchor`, `bars` as (kind, begin, width in percent, text), and the `tokens` of prompt and
    completion, None where they are not recorded. `totals` are (kind, seconds), `lacking` says what the record lacks.
    """
    completions = rollout.get("completions") or {}
    seconds: Sequence[float | None] = completions.get("seconds") or ()
    turns = {
        message["turn"]: (branch, message)
        for branch in branches
        for message in branch["messages"]
        if message["turn"] is not None
    }
    sampled = completions.get("tokens")
    usage = completions.get("usage") or [[None, count] for count in sampled or ()]
    end = inner = 0.0
    rows: list[dict[str, Any]] = []
    for turn in sorted(turns):
        branch, message = turns[turn]
        nested = branch["kind"] == "subagent"
        begin = inner if nested else end
        took = seconds[turn] if turn < len(seconds) else None
        parts = [("model", begin, took or 0.0, "model")] if took is not None else []
        begin = inner = begin + (took or 0.0)
        for call in message["calls"]:
            if call["seconds"] is not None:
                parts.append(("failed" if call["failed"] else "tool", begin, call["seconds"], call["name"]))
                begin += call["seconds"]
        inner, end = (begin, end) if nested else (inner, begin)
        prompt, made = usage[turn] if turn < len(usage) else (None, None)
        made = sampled[turn] if sampled is not None and turn < len(sampled) else made
        place = {name: message[name] for name in ("label", "anchor")}
        rows.append({**place, "kind": branch["kind"], "parts": parts, "tokens": (prompt, made)})
    totals = _totals(rollout)
    if took := dict(totals).get("reward"):
        parts = [("reward", end, took, "reward")]
        rows.append({"label": "reward", "anchor": "", "kind": "reward", "parts": parts, "tokens": (None, None)})
        end += took
    if not any(row["parts"] or row["tokens"][1] for row in rows) and not totals:
        return None
    whole = max(rollout.get("seconds") or 0.0, end) or 1.0
    for row in rows:
        parts = row.pop("parts")
        row["seconds"] = sum(part[2] for part in parts) if parts else None
        row["bars"] = [
            (kind, round(100 * begin / whole, 2), max(0.6, round(100 * took / whole, 2)), f"{text}: {took:.2f} s")
            for kind, begin, took, text in parts
        ]
    lacking = "the time of each completion" if not seconds and any(row["anchor"] for row in rows) else ""
    return {"rows": rows, "seconds": rollout.get("seconds"), "totals": totals, "lacking": lacking}


def _totals(rollout: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Seconds by kind, which together are those of the rollout. `rest`: set-up, and the environment's own."""
    model, own = rollout.get("seconds_in_model"), rollout.get("seconds_own")
    if model is None or own is None:
        return []
    found = {
        "model": model,
        "tools": max(0.0, own - model),
        "waiting": rollout.get("seconds_waiting") or 0.0,
        "reward": sum(call.get("seconds") or 0.0 for call in rollout.get("reward_calls") or ()),
    }
    found["rest"] = max(0.0, (rollout.get("seconds") or 0.0) - sum(found.values()))
    return [(kind, seconds) for kind, seconds in found.items() if seconds >= 0.005]
