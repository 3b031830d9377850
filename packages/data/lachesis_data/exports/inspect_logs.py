"""Logs of Inspect: a run as the `.eval` file that `inspect view` opens, with a sample for each rollout.

The file is a ZIP of JSON. Names and fields are those that inspect_ai 0.3.285 reads (`inspect_ai.log`, version 2 of its
logs). Samples are written one at a time; memory grows with the number of items only.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import shutil
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from lachesis_data.exports.chat_exports import valid_json
from lachesis_messages.images import image_urls
from lachesis_messages.markup import NotJson, load_json
from lachesis_messages.records.export_lines import BRANCHES_OMITTED, ExportLine, LeftOutRollout
from lachesis_messages.records.groups import (
    GroupRecord,
    RolloutRecord,
    has_other_branches,
    message_turns,
    stored_messages,
)
from lachesis_messages.records.jsonl import json_text
from lachesis_messages.records.sharegpt import WarningKind

VERSION = 2
TARGETS = ("target", "answer")
"""Fields of an item that are shown as the target of its samples, the first that is there."""

_LIMITS = {
    "max_turns": ("turn", "max_agent_turns"),
    "timeout": ("time", "rollout_timeout"),
    "context_exhausted": ("context", "rollout_token_budget"),
}
"""By outcome: Inspect's name of the limit, and the setting that is its value."""
_CONFIG = {"turn_limit": "max_agent_turns", "time_limit": "rollout_timeout", "token_limit": "rollout_token_budget"}
_METADATA = (
    *("rollout_id", "outcome", "reason", "reward", "unscored_kind", "agent_fault", "turn_rewards", "metrics"),
    *("attempts", "tool_calls", "api_calls", "policy_versions"),
)
_LARGE = ("messages", "output", "events", "events_data", "error_retries")
"""Fields of a sample that the list of samples does not have."""
_TEXT = 1024
"""Characters of a text in the list of samples."""


class InspectLog:
    """A sample for each rollout; the samples of an item are its epochs."""

    with_failures = True
    """It takes the groups without a scored rollout too: Inspect shows their errors."""
    ending = ".eval"
    """Inspect finds logs by it."""

    def __init__(self) -> None:
        self.settings: Mapping[str, Any] = {}
        """Those of the run, as its manifest has them."""
        self.first: GroupRecord | None = None
        self._epochs = defaultdict[str, set[int]](set)

    def __call__(self, group: GroupRecord) -> Iterator[ExportLine | LeftOutRollout]:
        self.first = self.first or group
        for rollout in group["rollouts"]:
            warnings: set[str] = {BRANCHES_OMITTED} if has_other_branches(rollout) else set()
            sample = self._sample(group, rollout, warnings)
            yield ExportLine(valid_json(sample, warnings), (rollout["rollout_id"],), tuple(sorted(warnings)))

    def open(self, path: Path) -> _LogFile:
        return _LogFile(path, self)

    def _sample(self, group: GroupRecord, rollout: RolloutRecord, warnings: set[str]) -> dict[str, Any]:
        item, key = group["item"], group["item_key"].partition("+")[0]
        epoch = rollout["index"] + 1
        while epoch in self._epochs[key]:  # another group of the same item
            epoch += 1
        self._epochs[key].add(epoch)
        scored = rollout["reward"] is not None
        stored = stored_messages(group, rollout)
        turns = message_turns(rollout, stored) or [0 if each["role"] == "assistant" else None for each in stored]
        messages = _messages(stored, rollout, group["model"], turns, warnings)
        start = next((place for place, turn in enumerate(turns) if turn is not None), len(messages))
        answers = [message for message in messages if message.get("source") == "generate"]
        asked = [message for message in messages[:start] if message["role"] != "system"]
        is_text = len(asked) == 1 and isinstance(asked[0]["content"], str)
        target = next((item[name] for name in TARGETS if name in item), "") if isinstance(item, Mapping) else ""
        finished = datetime.fromisoformat(group["timestamp"]).astimezone(UTC)
        started = (finished - timedelta(seconds=rollout["seconds"])).isoformat()
        usage = _usage(rollout)
        kind = rollout.get("unscored_kind") or rollout["outcome"]
        broken = not scored and kind != "declined"  # by a reward that gave none on purpose, or where there is no reward
        error = _error(f"{kind}: {rollout['reason']}", rollout["traceback"] or "") if broken else None
        return {
            "id": key,
            "epoch": epoch,
            "input": asked[0]["content"] if is_text else asked or _text(item),
            "target": [_text(each) for each in target] if isinstance(target, list) else _text(target),
            "messages": messages,
            "output": {**_output(group["model"], answers[-1:]), "usage": usage or None},
            "events": [
                {"uuid": f"{rollout['rollout_id']}-event-{number}", "timestamp": started, "working_start": 0, **event}
                for number, event in enumerate(_events(messages, group["model"], error))
            ],
            "events_data": {"messages": messages, "calls": []},
            "scores": {
                name: {"value": value, "explanation": rollout["reason"]}
                for name, value in ({"reward": None} | rollout["metrics"] | {"reward": rollout["reward"]}).items()
                if isinstance(value, int | float)
            }
            if scored
            else None,
            "metadata": {
                "item_key": group["item_key"],
                **{name: rollout[name] for name in _METADATA if name in rollout},
                "item": item,
            },
            "model_usage": {group["model"]: usage} if usage else {},
            "started_at": started,
            "completed_at": finished.isoformat(),
            "total_time": rollout["seconds"],
            "working_time": rollout.get("seconds_in_model", 0) + rollout.get("seconds_in_tools", 0),
            "uuid": rollout["rollout_id"],
            "turn_count": rollout["turns"],
            "error": error,
            "error_retries": [_error(reason) for reason in rollout["retried_after"]] or None,
            "limit": self._limit(rollout) if not broken and rollout["outcome"] != "completed" else None,
        }

    def _limit(self, rollout: RolloutRecord) -> dict[str, Any]:
        """What ended a rollout early that did not break; -1 is Inspect's word for a limit without a number."""
        kind, setting = _LIMITS.get(rollout["outcome"], ("custom", ""))
        return {"type": kind, "limit": self.settings.get(setting) or -1, "reason": rollout["reason"]}


def _messages(
    stored: Sequence[Mapping[str, Any]],
    rollout: RolloutRecord,
    model: str,
    turns: Sequence[int | None],
    warnings: set[str],
) -> list[dict[str, Any]]:
    known, names = rollout.get("calls") or {}, dict[str, str]()
    written = []
    for place, message in enumerate(stored):
        role, sampled = message["role"], turns[place] is not None
        content = _content(message.get("content"), warnings)
        if message.get("reasoning"):
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            content = [{"type": "reasoning", "reasoning": message["reasoning"]}, *texts]
        new = {"id": f"{rollout['rollout_id']}-{place}", "role": role, "content": content}
        if sampled:
            new |= {"source": "generate", "model": model}
        elif role in ("system", "user"):
            new["source"] = "input"
        if calls := message.get("tool_calls"):
            new["tool_calls"] = [_tool_call(call, warnings) for call in calls]
            names |= {call["id"]: call["function"]["name"] for call in calls}
        if role == "tool":
            call_id = message["tool_call_id"]
            new |= {"tool_call_id": call_id, "function": names.get(call_id, message.get("name"))}
            if known.get(call_id, {}).get("failed"):
                new["error"] = {"type": "unknown", "message": _plain(content)}
        written.append(new)
    return written


def _content(content: Any, warnings: set[str]) -> str | list[dict[str, Any]]:
    if content is None or isinstance(content, str):
        return content or ""
    parts: list[dict[str, Any]] = []
    for part in content:
        images = [url for url in image_urls([part]) if isinstance(url, str)]
        if part.get("type") != "text" and not images:
            warnings.add(WarningKind.PART_OMITTED)
        text = part["text"] if part.get("type") == "text" else f"[{part.get('type')}]"
        parts.append({"type": "image", "image": images[0]} if images else {"type": "text", "text": text})
    return parts


def _tool_call(call: Mapping[str, Any], warnings: set[str]) -> dict[str, Any]:
    name, text = call["function"]["name"], call["function"]["arguments"]
    written = {"id": call["id"], "function": name, "type": "function"}
    try:
        arguments = load_json(text) if text.strip() else {}
    except NotJson:
        arguments = None
    if isinstance(arguments, dict):
        return {**written, "arguments": arguments}
    warnings.add(WarningKind.ARGUMENTS_REPLACED)
    return {**written, "arguments": {}, "parse_error": f"no JSON object: {text}"}


def _events(
    messages: Sequence[Mapping[str, Any]], model: str, error: Mapping[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """What the first page of a sample shows: completions, whose prompts are ranges of `events_data`, and tool calls."""
    arguments: dict[str, Any] = {}
    for place, message in enumerate(messages):
        if message.get("source") == "generate":
            arguments |= {call["id"]: call["arguments"] for call in message.get("tool_calls", ())}
            prompt = {"input": [], "input_refs": [[0, place]], "tools": [], "tool_choice": "auto", "config": {}}
            yield {"event": "model", "model": model, **prompt, "output": _output(model, [message])}
        elif message["role"] == "tool":
            call = {"id": message["tool_call_id"], "function": message["function"] or ""}
            result = {"result": message["content"], "error": message.get("error"), "message_id": message["id"]}
            yield {"event": "tool", **call, "arguments": arguments.get(call["id"], {}), **result}
    if error:
        yield {"event": "error", "error": error}


def _output(model: str, answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    reasons = ["tool_calls" if "tool_calls" in answer else "stop" for answer in answers]
    choices = [{"message": answer, "stop_reason": reason} for answer, reason in zip(answers, reasons, strict=True)]
    return {"model": model, "choices": choices, "completion": "".join(_plain(each["content"]) for each in answers)}


def _usage(rollout: RolloutRecord) -> dict[str, int]:
    """Tokens as the server counted them; none where it left requests out, since the sums are then too small."""
    if rollout.get("prompt_tokens") is None or rollout.get("uncounted_requests"):
        return {}
    prompt, cached, completion = (rollout[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion"))
    return {
        "input_tokens": prompt - cached,
        "input_tokens_cache_read": cached,
        "output_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _error(message: str, traceback: str = "") -> dict[str, str]:
    return {"message": message, "traceback": traceback, "traceback_ansi": traceback}


def _plain(content: str | Sequence[Mapping[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _LogFile:
    """Writes samples as they come, and what is known of all of them at the end. Raises OSError."""

    def __init__(self, path: Path, log: InspectLog) -> None:
        self._log = log
        self._zip = ZipFile(path, "w", ZIP_DEFLATED)
        self._summaries = tempfile.TemporaryFile(dir=path.parent)  # noqa: SIM115
        self._values = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
        """Scorer -> id -> its scores."""
        self._counts, self._usage = Counter[str](), Counter[str]()
        self._times: tuple[str, ...] = ()
        self._ids = dict[str, None]()

    def write(self, sample: Mapping[str, Any]) -> None:
        self._write(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
        for name, score in (sample["scores"] or {}).items():
            self._values[name][sample["id"]].append(score["value"])
        self._counts.update(samples=1, errors=sample["error"] is not None)
        self._counts["epochs"] = max(self._counts["epochs"], sample["epoch"])
        self._usage.update(*sample["model_usage"].values())
        times = (*self._times, sample["started_at"], sample["completed_at"])
        self._times = (min(times), max(times))
        self._ids[sample["id"]] = None
        asked = sample["input"]
        summary = {
            **{name: value for name, value in sample.items() if name not in _LARGE},
            "input": (asked if isinstance(asked, str) else "\n".join(_plain(each["content"]) for each in asked))[
                :_TEXT
            ],
            "metadata": {key: value for key, value in sample["metadata"].items() if len(_text(value)) <= _TEXT},
            "error": sample["error"] and sample["error"]["message"],
            "retries": sample["error_retries"] and len(sample["error_retries"]),
            "limit": sample["limit"] and sample["limit"]["type"],
            "limit_reason": sample["limit"] and sample["limit"]["reason"],
            "completed": True,
            "message_count": len(sample["messages"]),
        }
        self._summaries.write((b"," if self._counts["samples"] > 1 else b"[") + json_text(summary))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        with self._summaries, self._zip:
            if kind is None:
                self._finish()

    def _write(self, name: str, content: Any) -> None:
        self._zip.writestr(_entry(name), json_text(content))

    def _finish(self) -> None:
        self._summaries.write(b"]" if self._counts["samples"] else b"[]")
        self._summaries.seek(0)
        with self._zip.open(_entry("summaries.json"), "w") as file:
            shutil.copyfileobj(self._summaries, file)
        tools = [tool["function"]["name"] for tool in (self._log.first or {}).get("tools") or ()]
        plan = {"steps": [{"solver": "lachesis", "params": {"tools": tools}}]}
        start: dict[str, Any] = {"version": VERSION, "eval": self._spec(), "plan": plan}
        scores, reductions = [], []
        for name, items in self._values.items():
            means = {item: statistics.fmean(values) for item, values in items.items()}
            spread = statistics.stdev(means.values()) / math.sqrt(len(means)) if len(means) > 1 else 0.0
            found = {"mean": statistics.fmean(means.values()), "stderr": spread}
            counts = {"scored_samples": len(means), "unscored_samples": len(self._ids) - len(means)}
            metrics = {metric: {"name": metric, "value": value} for metric, value in found.items()}
            scores.append({"name": name, "scorer": name, "reducer": "mean", **counts, "metrics": metrics})
            of_items = [{"value": value, "sample_id": item} for item, value in means.items()]
            reductions.append({"scorer": name, "reducer": "mean", "samples": of_items})
        self._write("reductions.json", reductions)
        self._write("_journal/start.json", start)
        done = self._counts["samples"] - self._counts["errors"]
        results = {"total_samples": self._counts["samples"], "completed_samples": done, "scores": scores}
        started, completed = self._times or ("", "")
        usage = {start["eval"]["model"]: self._usage} if self._usage else {}
        stats = {"started_at": started, "completed_at": completed, "model_usage": usage}
        self._write("header.json", {**start, "status": "success", "results": results, "stats": stats})

    def _spec(self) -> dict[str, Any]:
        group, settings = self._log.first or {}, self._log.settings
        temperature = "eval_temperature" if group.get("evaluation") else "agent_temperature"
        ids = list(self._ids)
        length = "max_token_length"
        config = {theirs: math.ceil(settings[ours]) for theirs, ours in _CONFIG.items() if settings.get(ours)}
        metrics = [{"name": f"inspect_ai/{name}"} for name in ("mean", "stderr")]
        task, run = group.get("environment", "lachesis"), str(group.get("run", ""))
        return {
            "eval_id": run,
            "run_id": run,
            "created": self._times[0] if self._times else datetime.fromtimestamp(0, UTC).isoformat(),
            "task": task,
            "task_id": f"{task}-{run}",
            "metadata": {name: value for name, value in settings.items() if isinstance(value, str | int | float)},
            "dataset": {"name": settings.get("dataset_name") or task, "samples": len(ids), "sample_ids": ids},
            "sandbox": {"type": settings["terminal_backend"]} if "terminal_backend" in settings else None,
            "model": group.get("model", ""),
            "model_generate_config": {"temperature": settings.get(temperature), "max_tokens": settings.get(length)},
            "config": {"epochs": max(1, self._counts["epochs"]), "epochs_reducer": ["mean"], **config},
            "packages": {"lachesis-rl": importlib.metadata.version("lachesis-core")},
            "scorers": [{"name": name, "metrics": metrics} for name in self._values],
        }


def _entry(name: str) -> ZipInfo:
    """The same run gives the same file: no entry has the time of the export."""
    entry = ZipInfo(name)
    entry.compress_type = ZIP_DEFLATED
    return entry
