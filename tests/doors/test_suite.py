"""The conformance suite of doors, on doors whose other side is a script here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import pytest
import pytest_asyncio

from lachesis.cli.environment_classes import environment_class
from lachesis_doors.processes import Package, ProcessEnv
from lachesis_testing import DoorSuite, call, say
from tests.doors.test_processes import SCRIPT
from tests.doors.test_servers import OpenEnv, Ors, guesses, served, speaks


class TestSums(DoorSuite):
    """Tools, with rewards of steps."""

    def model(self, request: dict[str, Any]) -> Any:
        wanted = request["messages"][0]["content"].strip(".").split()[-1]
        return call(("add", {"by": int(wanted)}))

    @pytest.fixture
    def environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        monkeypatch.chdir(tmp_path)
        guest_script = tmp_path / "sums.py"
        guest_script.write_text(SCRIPT)

        class SumEnv(ProcessEnv):
            package = Package("json", "json")
            script: ClassVar[Path] = guest_script

        return SumEnv.at("sums:easy")


class TestOrs(DoorSuite):
    """A server that has the sessions."""

    def model(self, request: dict[str, Any]) -> Any:
        return guesses(4, 5, 6)(request)

    @pytest_asyncio.fixture
    async def environment(self) -> AsyncIterator[Any]:
        async with served(Ors().app) as address:
            yield environment_class(f"ors:http://{address}/numbers")

    @pytest.fixture
    def kill(self) -> None:
        return None  # tests/doors/test_servers.py breaks off its answers


class TestOpenEnv(DoorSuite):
    """A server with one place."""

    def model(self, request: dict[str, Any]) -> Any:
        return speaks("step", "what")(request)

    @pytest_asyncio.fixture
    async def environment(self) -> AsyncIterator[Any]:
        async with served(OpenEnv().app) as address:
            yield environment_class(f"openenv:ws://{address}")

    @pytest.fixture
    def kill(self) -> None:
        return None


SERVER = """
import json, sys

NUMBER = {"type": "integer"}
ADD = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    given = asked.get("params") or {}
    if asked["method"] == "initialize":
        result = {"protocolVersion": given["protocolVersion"], "capabilities": {"tools": {}}}
    elif asked["method"] == "tools/list":
        result = {"tools": [{"name": "add", "description": "Add.", "inputSchema": ADD}]}
    else:
        try:
            text, failed = str(given["arguments"]["a"] + given["arguments"]["b"]), False
        except Exception as error:
            text, failed = repr(error), True
        result = {"content": [{"type": "text", "text": text}], "isError": failed}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


class TestMcp(DoorSuite):
    """A server in the sandbox of each rollout."""

    def model(self, request: dict[str, Any]) -> Any:
        answered = request["messages"][-1]["role"] == "tool"
        return say("7") if answered else call(("sums__add", {"a": 3, "b": 4}))

    @pytest.fixture
    def environment(self, tmp_path: Path) -> Any:
        row = {"prompt": "Add 3 and 4.", "answer": "7", "files": {"server.py": SERVER}}
        tasks = tmp_path / "tasks.jsonl"
        tasks.write_text("".join(json.dumps({**row, "prompt": f"{row['prompt']} {n}"}) + "\n" for n in range(6)))
        return environment_class(f"mcp:{tasks}?command={quote('python3 server.py')}&name=sums")

    @pytest.fixture
    def kill(self) -> None:
        return None


MISTAKES = {
    # what the script has, what a bad one has, and the test that notices it
    "items drawn at random": (
        '{"item": {"number": number}',
        '{"item": {"number": __import__("random").random()}',
        "items_are_json",
    ),
    "a schema without its argument": (
        '"properties": {"by": {"type": "integer"}}',
        '"properties": {}',
        "models_can_call",
    ),
    "no number for a reward": ('"reward": 1.0 if done', '"reward": float("nan") if done', "plays_to_an_end"),
    "an exception for odd text": (
        'return {"text": "Go on."',
        'return {"text": text.encode("ascii").decode()',
        "gets_wrong",
    ),
    "one number for all": (
        "self.value += arguments",
        "Sum.shared = self.value = getattr(Sum, 'shared', 0) + arguments",
        "do_not_meet",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
async def test_a_door_with_a_mistake_does_not_pass(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    right, wrong, noticed_by = MISTAKES[mistake]
    assert right in SCRIPT
    guest_script = tmp_path / "sums.py"
    guest_script.write_text(SCRIPT.replace(right, wrong))

    class SumEnv(ProcessEnv):
        package = Package("json", "json")
        script: ClassVar[Path] = guest_script

    suite = TestSums()
    (name,) = [name for name in dir(DoorSuite) if name.startswith("test_") and noticed_by in name]
    given = (say("\u6f22"),) if "gets_wrong" in name else ()
    with pytest.raises(AssertionError):
        await getattr(suite, name)(SumEnv.at("sums:easy"), tmp_path, *given)
