"""Tool results as JSON objects: for `handle_function_call` always, for the model on request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lachesis_tools import BUILTIN_TOOLS
from lachesis_tools.json_results import as_json
from tests.support.scripted_server import call, say
from tests.support.small_envs import SortWords, lines, process


@given(st.sampled_from([*BUILTIN_TOOLS, "own"]), st.text() | st.dictionaries(st.text(), st.integers()).map(json.dumps))
def test_every_result_is_an_object_that_holds_the_text(tool: str, content: str) -> None:
    found = json.loads(as_json(tool, content))
    assert isinstance(found, dict)
    assert content in found.values() or found == json.loads(content)
    assert as_json(tool, '{"error": "no such file"}') == '{"error": "no such file"}'


@pytest.mark.parametrize("format", ["text", "json"])
async def test_the_model_reads_json_on_request(tmp_path: Path, format: str) -> None:
    steps = [
        ("write_file", {"path": "a.json", "content": '{"a": 1}'}),
        ("terminal", {"command": "cat a.json"}),
        ("read_file", {"path": "a.json"}),
        ("read_file", {"path": "none"}),
        ("python", {"code": "print('{\"a\": 1}')"}),
    ]

    def policy(request: dict[str, Any]) -> Any:
        done = sum(message["role"] == "tool" for message in request["messages"])
        return call(steps[done]) if done < len(steps) else say("Done.")

    settings = {"tool_result_format": format, "enabled_toolsets": ["terminal", "file", "python"]}
    await process(SortWords, tmp_path, policy, total_steps=1, group_size=1, max_agent_turns=9, **settings)
    (group,) = lines(tmp_path / "groups.jsonl")
    read = [message["content"] for message in group["messages"][0] if message["role"] == "tool"]
    assert json.loads(read[1])["output"] == '{"a": 1}'
    assert "no such file" in json.loads(read[3])["error"]
    if format == "json":
        assert json.loads(read[2])["content"].startswith('     1\t{"a": 1}')
        assert list(json.loads(read[0])) == list(json.loads(read[4])) == ["output"]
    else:
        assert read[2].startswith('     1\t{"a": 1}') and read[4].strip() == '{"a": 1}'
