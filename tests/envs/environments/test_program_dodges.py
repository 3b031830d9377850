"""What an agent program asks of its endpoint cannot keep it from being scored, and failures of servers still do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lachesis.settings.server_settings import ServerConfig
from tests.envs.environments.test_agent_program import AGENT, SortsByProgram
from tests.support import training_runs
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import rollouts

ASK = """python3 - <<'END'
import json, os, urllib.error, urllib.request
def ask(content, seconds=100, **more):
    body = json.dumps({"messages": [{"role": "user", "content": content}], **more}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        print(urllib.request.urlopen(request, timeout=seconds).status)
    except urllib.error.HTTPError as error:
        print(error.code)
    except OSError as error:
        print(error)
CODE
END"""


def asks(code: str, command: str = "true") -> Any:
    """A model that lets its program run `code` once, where `ask` asks the endpoint."""

    async def answer(request: dict[str, Any]) -> Any:
        asked = str(request["messages"][-1]["content"])
        if asked.startswith("refuse"):
            return int(asked.split()[1])
        if asked.startswith("wait"):
            await asyncio.sleep(float(asked.split()[1]))
            return say("At last.")
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        return call(("bash", {"command": f"{ASK.replace('CODE', code)}\n{command}"}))

    return answer


async def played(folder: Path, policy: Any, command: str = f"python3 {AGENT}", **settings: Any) -> dict[str, Any]:
    async with ScriptedServer(policy) as server:
        model = ServerConfig(base_url=server.base_url, model_name="scripted", api_key="x", max_retries=0)
        chosen = {"total_steps": 1, "group_size": 1, "max_infra_retries": 0, "command": command, **settings}
        env = training_runs.environment(SortsByProgram, folder, model, **chosen)
        ran = await env.process_manager()
    files = [file for file in (ran.files.groups, ran.files.failures) if file.exists()]
    (rollout,) = [rollout for file in files for rollout in rollouts(file)]
    return rollout


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_a_request_that_the_server_refuses_for_what_it_says_is_the_programs(tmp_path: Path, status: int) -> None:
    rollout = await played(tmp_path, asks(f"ask('refuse {status}')"))
    assert (rollout["outcome"], rollout["reward"]) == ("completed", 0.0), rollout["reason"]
    (reason,) = rollout["program"]["refused"]
    assert f"rejected the request with {status}" in reason


@pytest.mark.parametrize("status", [401, 500, 503])
async def test_a_server_that_fails_beside_is_no_score(tmp_path: Path, status: int) -> None:
    try:
        rollout = await played(tmp_path, asks(f"ask('refuse {status}')"))
    except Exception as error:  # the key or the name of the model is wrong: the run stops and says so
        assert status == 401 and "with 401" in str(error)
        return
    assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)


async def test_a_server_that_refuses_every_request_is_no_score(tmp_path: Path) -> None:
    rollout = await played(tmp_path, lambda request: 400, max_infra_retries=1)
    assert (rollout["outcome"], rollout["reward"], rollout["attempts"]) == ("infra_error", None, 1)
    assert "rejected the request with 400" in rollout["reason"]


WAYS = {
    "is stopped with a long request": "ask('wait 5')",
    "gives one up before its time ends": "ask('wait 5', 3.4); import time; time.sleep(60)",
    "asks many": "import threading\nfor _ in range(8): threading.Thread(target=ask, args=('wait 5',)).start()",
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_a_long_completion_at_the_end_of_its_time_is_the_programs_own(tmp_path: Path, way: str) -> None:
    rollout = await played(tmp_path, asks(WAYS[way]), rollout_timeout=4.0)
    assert (rollout["outcome"], rollout["reward"]) == ("timeout", 0.0), rollout["reason"]
    assert rollout["seconds_own"] > rollout["seconds_waiting"]


@pytest.mark.slow
async def test_a_server_that_hangs_at_the_end_of_its_time_is_no_score(tmp_path: Path) -> None:
    rollout = await played(tmp_path, asks("ask('wait 60')"), rollout_timeout=4.0)
    assert (rollout["outcome"], rollout["reward"]) == ("infra_error", None)
    assert "of which the model server took" in rollout["reason"]


async def test_what_a_program_does_to_its_way_out_is_scored(tmp_path: Path) -> None:
    code = json.dumps(
        "import os, socket\nheld = []\ntry:\n    while True:\n        held.append(socket.create_connection("
        "('127.0.0.1', int(os.environ['ANTHROPIC_BASE_URL'].split(':')[2].split('/')[0]))))\n"
        "        held[-1].send(b'POST / HTTP/1.1\\r\\nContent-Length: 999999999\\r\\n\\r\\n')\n"
        "        len(held) > 600 and 1 / 0\nexcept (OSError, ZeroDivisionError):\n    pass"
    )
    rollout = await played(tmp_path, asks(f"exec({code})"))
    assert (rollout["outcome"], rollout["reward"]) == ("completed", 0.0), rollout["reason"]
