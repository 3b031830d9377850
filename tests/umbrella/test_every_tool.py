"""One rollout with exact tokens calls every tool once, and everything that was sampled in it is delivered once.

A new tool is a line of `STEPS`: its arguments, and what is in its result.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lachesis import HermesAgentBaseEnv
from lachesis_testing.fake_server import Ask, FakeServer
from lachesis_testing.scripted_server import ScriptedServer, say
from lachesis_tokens.verbs.verify import main, verify_file
from lachesis_tools.browser import check_browser_requirements
from tests.support.job_groups import PICTURE
from tests.support.small_envs import lines
from tests.support.training_runs import environment, with_tokens
from tests.tools.test_mcp_toolset import COMMAND

TASK = "Call every tool once."
SUBTASK = "Say which fruit is in fruit.txt."


class Step(NamedTuple):
    """A turn of the agent: one call."""

    tool: str
    arguments: Mapping[str, Any]
    said: str


STEPS = (
    Step("terminal", {"command": "printf 'pear\\n' > fruit.txt; cat fruit.txt"}, "pear"),
    Step("process", {"action": "list"}, '{"processes": []}'),
    Step("read_file", {"path": "fruit.txt"}, "1\tpear"),
    Step("write_file", {"path": "more.txt", "content": "fig\n"}, "more.txt"),
    Step("patch", {"path": "more.txt", "old_string": "fig", "new_string": "kiwi"}, "+kiwi"),
    Step("search_files", {"pattern": "kiwi"}, "more.txt"),
    Step("python", {"code": "6 * 7"}, "42"),
    Step("todo", {"todos": [{"id": "1", "content": "eat"}]}, '"pending": 1'),
    Step("memory", {"action": "add", "content": "pears are green"}, "pears are green"),
    Step("web_search", {"query": "pear"}, "https://fruit.example/pear"),
    Step("web_extract", {"urls": ["https://fruit.example/pear"]}, "A pear is a fruit."),
    Step("execute_code", {"code": "import tools; print(tools.read_file('fruit.txt')['content'])"}, '{"read_file": 1}'),
    Step("clarify", {"question": "Which one?", "choices": ["pear", "kiwi"]}, "the pear"),
    Step("sums__add", {"by": 5}, "5"),
    Step("vision_analyze", {"image_url": PICTURE, "question": "What is it?"}, "A dot."),
    Step("delegate_task", {"goal": SUBTASK, "toolsets": ["terminal"]}, "There is a pear in it."),
)
PAGE = "<title>Fruit</title><h1>Pears</h1><input aria-label=Name><a href=/more.txt>More</a><img src=/dot.png alt=dot>"
BROWSER_STEPS = (
    Step("terminal", {"command": f"echo '{PAGE}' > index.html"}, '"exit_code": 0'),
    Step("terminal", {"command": "python3 -m http.server -b 127.0.0.1 8123", "background": True}, "session_id"),
    Step("terminal", {"command": "for i in $(seq 50); do (: </dev/tcp/127.0.0.1/8123) && break; sleep 0.1; done"}, "0"),
    Step("browser_navigate", {"url": "http://127.0.0.1:8123/"}, "Pears"),
    Step("browser_snapshot", {}, "[ref=e2]"),
    Step("browser_type", {"ref": "@e2", "text": "kiwi"}, "kiwi"),
    Step("browser_press", {"key": "Tab"}, '"success": true'),
    Step("browser_scroll", {"direction": "down"}, '"success": true'),
    Step("browser_get_images", {}, "dot.png"),
    Step("browser_vision", {"question": "What is it?"}, "A dot."),
    Step("browser_click", {"ref": "@e3"}, '"clicked": "@e3"'),
    Step("browser_back", {}, "http://127.0.0.1:8123/"),
    Step("browser_console", {"expression": "document.title"}, "Fruit"),
)
HAS_BROWSER = check_browser_requirements() is None
ALL = (*STEPS, *(BROWSER_STEPS if HAS_BROWSER else ()))
SUB_AGENT = (Step("terminal", {"command": "cat fruit.txt"}, "pear"),)


class EveryTool(HermesAgentBaseEnv):
    """A task for all tools."""

    name = "every-tool"
    toolsets = (
        *("terminal", "file", "python", "todo", "memory", "web", "vision", "code_execution", "clarify", "mcp"),
        *("delegation", *(["browser"] if HAS_BROWSER else [])),
    )

    async def get_next_item(self) -> str:
        return TASK

    def format_prompt(self, item: str) -> str:
        return item

    def follow_up(self, item: str, messages: list[dict[str, Any]]) -> str | None:
        return "the pear" if messages[-1]["content"].startswith("Which one?") else None

    async def compute_reward(self, item: str, result: Any, ctx: Any) -> float:
        return float(all(count.failure == 0 for count in result.tool_counts.values()))


def model(ask: Ask) -> str:
    steps, answer = (ALL, "All are called.") if TASK in ask.prompt else (SUB_AGENT, "There is a pear in it.")
    if ask.turn >= len(steps):
        return answer
    call = {"name": steps[ask.turn].tool, "arguments": steps[ask.turn].arguments}
    return f"I call {call['name']}.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"


async def test_a_rollout_that_calls_every_tool_is_delivered_exactly(tmp_path: Path, capsys: Any) -> None:
    pages = tmp_path / "pages.jsonl"
    page = {"url": "https://fruit.example/pear", "title": "Pears", "text": "A pear is a fruit."}
    pages.write_text(json.dumps(page) + "\n")
    async with FakeServer(model) as server, ScriptedServer([say("A dot.")]) as eyes:
        settings = {"web": f"corpus:{pages}", "mcp": {"sums": COMMAND}, "group_size": 1, "max_agent_turns": 60}
        settings["vision"] = f"eyes@{eyes.base_url}"
        env = environment(EveryTool, tmp_path, with_tokens(server, tmp_path), **settings)
        assert {*env.tools, "sums__add"} == {step.tool for step in ALL}
        await env.process_manager()
        sampled = Counter(
            (tuple(seen.call.prompts[made.prompt]), tuple(made.ids))
            for seen in server.requests
            if seen.call is not None
            for made in seen.completions
        )
    ((group,), file) = lines(tmp_path / "groups.jsonl"), tmp_path / "groups.jsonl"
    (rollout,) = group["rollouts"]
    results = [message["content"] for message in group["messages"][0] if message["role"] == "tool"]
    for step, result in zip(ALL, results, strict=True):
        assert step.said in result, (step.tool, result)
    assert (rollout["reward"], rollout["outcome"]) == (1.0, "completed")
    (sub_agent,) = [call["subagent"] for call in rollout["calls"].values() if "subagent" in call]
    assert [message["role"] for message in sub_agent["messages"]] == ["user", "assistant", "tool", "assistant"]
    delivered = Counter(
        (tuple(sample["tokens"][: span["start"]]), tuple(sample["tokens"][span["start"] : span["end"]]))
        for sample in group["samples"]
        for span in sample["spans"]
    )
    assert delivered == sampled and len(sampled) == len(ALL) + len(SUB_AGENT) + 2
    totals, count = verify_file(file), sum(len(ids) for _, ids in sampled)
    assert (totals.sampled, totals.delivered, totals.duplicated, totals.wrong_prefix) == (count, count, 0, 0)
    capsys.readouterr()
    assert main([str(file)]) == 0
    assert "ok" in capsys.readouterr().out
