"""What a model writes is never code in the process of a guest. The packages are stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lachesis_doors.guest_process import INSIDE, GuestProcess, NotLoaded

FILES = {
    "bfcl_eval/__init__.py": "",
    "bfcl_eval/constants/default_prompts.py": "DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING = '{functions}'",
    "bfcl_eval/constants/enums.py": "Language = {'PYTHON': 'python'}",
    "bfcl_eval/constants/executable_backend_config.py": (
        "CLASS_FILE_PATH_MAPPING = {'Files': 'bfcl_files'}\nSTATELESS_CLASSES = ['Files']\n"
        "MULTI_TURN_FUNC_DOC_FILE_MAPPING = {'Files': 'files.json'}\n"
    ),
    "bfcl_eval/eval_checker/ast_eval/ast_checker.py": "def ast_checker(*given): return {'valid': True}",
    "bfcl_eval/eval_checker/multi_turn_eval/multi_turn_utils.py": "",
    "bfcl_eval/eval_checker/multi_turn_eval/multi_turn_checker.py": (
        "from bfcl_files import Files\n"
        "def multi_turn_checker(said, truth, entry, category, model):\n"
        "    made = [eval('Files().' + call) for turn in said for each in turn for call in each]\n"
        "    return {'valid': made == ['[None]', \"['a (b)']\"]}\n"
    ),
    "bfcl_files.py": (
        "class Files:\n def ls(self, a=None): return str([a])\n"
        " def find(self, path='.', deep=None): return str([path])\n"
    ),
    "bfcl_eval/data/BFCL_v4_multi_turn_base.json": (
        '{"id": "one", "question": [[{"role": "user", "content": "Look."}]], "involved_classes": ["Files"], '
        '"initial_config": {}}'
    ),
    "bfcl_eval/data/possible_answer/BFCL_v4_multi_turn_base.json": '{"id": "one", "ground_truth": [["ls()"]]}',
    "bfcl_eval/data/multi_turn_func_doc/files.json": (
        '{"name": "ls", "description": "", "parameters": {"type": "dict", "properties": {"a": {"type": "boolean"}}}}\n'
        '{"name": "find", "description": "", "parameters": {"type": "dict", "properties": {"path": {"type": "string"}, '
        '"deep": {"type": "any"}}}}'
    ),
    "bfcl_eval/data/BFCL_v4_irrelevance.json": (
        '{"id": "two", "question": [[{"role": "user", "content": "Hi."}]], "function": [{"name": "ls", "description": '
        '"", "parameters": {"type": "dict", "properties": {}}}]}'
    ),
    "skyrl_gym/__init__.py": "",
    "rows.jsonl": '{"prompt": []}\n',
}


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LACHESIS_DOORS", str(tmp_path / "doors"))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return lambda script, target, **arguments: GuestProcess(str(python), INSIDE / f"{script}.py", target, arguments)


async def test_what_bfcl_evaluates_are_calls_of_the_schema_with_literals(guest: Any, tmp_path: Path) -> None:
    found = guest("bfcl", "multi_turn_base")
    await found.start()
    refused = [
        ("ls", {f"a=open({str(tmp_path / 'ran')!r}, 'w')) or dict(a": True}, "has no argument"),
        ("ls", {"b": True}, "it has a."),
        ("ls", {"": True}, "it has a."),
        ("__init__", {}, "there are find, ls"),
        ("ls() or find", {}, "there are find, ls"),
        ("find", {"deep": float("nan")}, "finite numbers"),
        ("find", {"deep": [{"a": float("-inf")}]}, "finite numbers"),
    ]
    try:
        item = await found.call("item", number=0)
        assert [tool["parameters"]["additionalProperties"] for tool in item["tools"]] == [False, False]
        await found.call("open", "one", item=item["item"])
        for name, arguments, why in refused:
            answer = await found.call("call", "one", name=name, arguments=arguments)
            assert why in answer["text"] and answer["error"], (name, answer)
        assert (await found.call("call", "one", name="ls", arguments={}))["text"] == "[None]"
        odd = {"path": "a (b)", "deep": [{"'": None, "x": [-1.5, True, "\"'\n\ud800"]}]}
        assert "error" not in await found.call("call", "one", name="find", arguments=odd)
        assert (await found.call("score", "one", messages=[]))["reward"] == 1.0
        assert not (tmp_path / "ran").exists()
    finally:
        await found.close()


async def test_a_call_that_is_refused_is_a_call_where_bfcl_wants_none(guest: Any) -> None:
    found = guest("bfcl", "irrelevance")
    await found.start()
    try:
        item = await found.call("item", number=0)
        await found.call("open", "one", item=item["item"])
        made = {"role": "assistant", "tool_calls": [{"function": {"name": "ls", "arguments": '{"no": 1}'}}]}
        assert (await found.call("score", "one", messages=[made]))["reward"] == 0.0
        assert (await found.call("score", "one", messages=[{"role": "assistant"}]))["reward"] == 1.0
    finally:
        await found.close()


@pytest.mark.parametrize("name", ["lcb", "rlm"])
async def test_environments_of_skyrl_that_run_the_agents_code_have_to_be_allowed_to(
    guest: Any, name: str, tmp_path: Path
) -> None:
    rows = str(tmp_path / "rows.jsonl")
    with pytest.raises(NotLoaded, match="outside of any sandbox"):
        await guest("skyrl", name, rows=rows).start()
    found = guest("skyrl", name, rows=rows, run_code=True)
    await found.start()
    await found.close()
