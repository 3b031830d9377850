"""Entries, settings and a quick counter for the tests of compression."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from lachesis_data.compression.compressor import Summarizer, TokenCounter
from lachesis_data.compression.settings import CompressionFileSettings
from lachesis_data.compression.summary import Passage, SummaryAnswer, extractive_summary
from lachesis_messages.records.entries import to_dataset_entry, to_trajectory_entry

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    }
    for name in ("terminal", "read_file", "web_search")
]


class Words:
    """Counts words, where a tokenizer would only take time."""

    def conversation(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], stopped: Callable[[], bool]
    ) -> int:
        return self.text(json.dumps([*messages, *tools]))

    def text(self, text: str) -> int:
        return len(text.split())


def entry_of(form: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    if form == "messages":
        return {"id": 7, "messages": messages, "tools": TOOLS}
    if form == "dataset":
        return {**to_dataset_entry(messages, TOOLS).entry, "extra": [1]}
    return to_trajectory_entry(messages, TOOLS, model="m", completed=True, timestamp="t", extra=[1]).entry


def settings_of(target: int, summary: int = 30, **sections: Any) -> CompressionFileSettings:
    budget = {"target_max_tokens": target, "summary_target_tokens": summary}
    return CompressionFileSettings.model_validate({"compression": budget, **sections})


def extracting(counter: TokenCounter, tokens: int) -> Summarizer:
    async def extract(passages: Sequence[Passage]) -> SummaryAnswer:
        return SummaryAnswer(extractive_summary(passages, tokens, counter.text))

    return extract


def agent_entry(steps: int, form: str = "trajectory", words: int = 40) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Fix it"}]
    for step in range(steps):
        function = {"name": "terminal", "arguments": json.dumps({"x": f"cat {step}"})}
        calls = [{"id": f"id_{step}", "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": None, "reasoning": "I look.", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": f"id_{step}", "content": f"output {step} " + "word " * words})
    return entry_of(form, [*messages, {"role": "assistant", "content": "Done."}])
