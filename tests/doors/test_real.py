"""Doors against what they open to: `make test-doors` installs it, each into an interpreter of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import lachesis_doors
from lachesis.cli.environment_classes import environment_class
from lachesis.settings.server_settings import ServerConfig
from lachesis_doors.guest_process import INSIDE, GuestProcess
from lachesis_doors.processes import PACKAGES, interpreter
from lachesis_envs.gsm8k import GSM8kAgentEnv
from lachesis_envs.gsm8k.symbolic import gsm_symbolic
from lachesis_testing.fake_server import FakeServer
from tests.doors.frames import golden, keep, outline, recorded
from tests.doors.real.record_frames import FRAMES, RECORDED, frames_of
from tests.doors.test_agent_serving import guesses, gym, tokens_of
from tests.doors.test_frames import served_halves
from tests.doors.test_serving import Served, served
from tests.doors.test_training_contract import KINDS, trained_by_nemo, verified
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, make, process, rollouts

DOORS = Path(os.environ.get("LACHESIS_DOORS") or Path.home() / ".cache/lachesis/doors")
GUESTS = Path(os.environ.get("GUESTS") or Path.home() / ".cache/lachesis/guests")
HERE = Path(__file__).parent / "real"
pytestmark = pytest.mark.skipif(
    not os.environ.get("LACHESIS_NEED_DOORS"), reason="environments of others: `make test-doors` has them"
)


async def play(target: str, folder: Path, model: Any, **settings: Any) -> Any:
    folder.mkdir(exist_ok=True)
    chosen = {"total_steps": 2, "group_size": 2, "max_agent_turns": 12, **settings}
    return await process(environment_class(target), folder, model, enabled_toolsets=[], **chosen)


@contextlib.contextmanager
def server(scheme: str, path: str, program: str = "server", *more: str) -> Iterator[int]:
    """The port of a server of `real/` that answers at `path`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(DOORS / scheme / "bin/python"), str(HERE / f"{scheme}_{program}.py"), str(port), *more]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        try:
            end = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                        break
                except OSError:
                    assert running.poll() is None and time.monotonic() < end
                    time.sleep(0.2)
            yield port
        finally:
            running.terminate()


def halves(request: dict[str, Any]) -> Any:
    """A model that halves the interval from 1 to 9."""
    (tool,) = request["tools"]
    low, high = 1, 9
    for message in request["messages"]:
        if message["role"] == "tool":
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "higher" in message["content"] else (low, middle - 1)
    return call((tool["function"]["name"], {"number": (low + high) // 2}))


async def test_the_open_reward_standard(tmp_path: Path) -> None:
    with server("ors", "/health") as port:
        target = f"ors:http://127.0.0.1:{port}/numbers"
        found = rollouts((await play(target, tmp_path / "played", halves)).files.groups)
        assert sorted((each["reward"], each["turns"], each["outcome"]) for each in found) == [
            *[(0.5, 3, "completed")] * 2,
            *[(0.75, 2, "completed")] * 2,
        ]
        fails = await play(
            target, tmp_path / "broken", lambda _: call(("guess", {"number": 13})), total_steps=1, group_size=1
        )
        (each,) = rollouts(fails.files.failures)
        assert (each["reward"], each["unscored_kind"]) == (None, "environment")
        assert "the environment fell over" in each["traceback"]

        def wrong(request: dict[str, Any]) -> Any:
            return call(("guess", {"number": "many"})) if len(request["messages"]) < 2 else say("No.")

        (each,) = rollouts((await play(target, tmp_path / "wrong", wrong, total_steps=1, group_size=1)).files.groups)
        assert (each["reward"], len(each["tool_errors"])) == (0.0, 1)


async def test_openenv_with_more_rollouts_than_sessions(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        asked = request["messages"][0]["content"].removeprefix("say ")
        return call(("step", {"message": "what" if len(request["messages"]) < 2 else asked}))

    with server("openenv", "/health") as port:
        found = rollouts((await play(f"openenv:ws://127.0.0.1:{port}", tmp_path, model, group_size=4)).files.groups)
    assert [(each["reward"], each["outcome"]) for each in found] == [(0.5, "completed")] * 8


@dataclass(frozen=True)
class McpTask:
    """What a server of PyPI is asked, and how the sandbox shows that it was done."""

    command: str
    turns: Sequence[tuple[str, Mapping[str, Any]]]
    task: Mapping[str, Any]
    said: str
    """In the answer to the last call."""


MCP_TASKS = {
    "time": McpTask(
        "mcp-server-time",
        [("convert_time", {"source_timezone": "UTC", "time": "12:00", "target_timezone": "Asia/Kolkata"})],
        {"answer": "17:30"},
        "17:30",
    ),
    "git": McpTask(
        "mcp-server-git",
        [
            ("git_add", {"repo_path": "shop", "files": ["prices.txt"]}),
            ("git_commit", {"repo_path": "shop", "message": "Raise the price of tea"}),
        ],
        {
            "files": {"shop/prices.txt": "tea 3\n"},
            "setup": "git -C shop init -q && git -C shop config user.name A && git -C shop config user.email a@b.c",
            "check": "git -C shop log --format=%s | grep -qx 'Raise the price of tea'",
        },
        "committed",
    ),
    "sqlite": McpTask(
        "mcp-server-sqlite --db-path shop.db",
        [
            ("create_table", {"query": "create table prices (name text, price integer)"}),
            ("write_query", {"query": "insert into prices values ('tea', 3), ('milk', 2)"}),
        ],
        {
            "check": "python3 -c \"import sqlite3; found = sqlite3.connect('shop.db').execute("
            "'select sum(price) from prices').fetchone(); raise SystemExit(found != (5,))\""
        },
        "affected_rows': 2",
    ),
    "fetch": McpTask(
        "mcp-server-fetch --ignore-robots-txt --allow-private-ips",
        # Not raw, it would let npm install a program.
        [("fetch", {"url": "http://127.0.0.1:8093/prices.html", "raw": True})],
        {
            "files": {"site/prices.html": "<html><body><p>Tea costs three coins.</p></body></html>"},
            "setup": "cd site && (python3 -m http.server 8093 --bind 127.0.0.1 >/dev/null 2>&1 &) && sleep 1",
            "answer": "done",
        },
        "Tea costs three coins",
    ),
}


async def play_mcp(name: str, folder: Path, model: Any, **settings: Any) -> Any:
    given = MCP_TASKS[name]
    (folder / "tasks.jsonl").write_text(json.dumps({"prompt": "Do it.", **given.task}) + "\n")
    command = quote(f"{DOORS / 'mcp/bin'}/{given.command}")
    base = Path(os.path.realpath(DOORS / "mcp/bin/python")).parents[1]
    mounts = [str(DOORS / "mcp"), *([] if base.is_relative_to("/usr") else [str(base)])]
    target = f"mcp:{folder / 'tasks.jsonl'}?command={command}&name={name}"
    return await play(target, folder, model, total_steps=1, terminal_options={"mounts": mounts}, **settings)


@pytest.mark.parametrize("name", MCP_TASKS)
async def test_mcp_servers_of_others(name: str, tmp_path: Path) -> None:
    given = MCP_TASKS[name]

    def model(request: dict[str, Any]) -> Any:
        done = sum(message["role"] == "tool" for message in request["messages"])
        if done == len(given.turns):
            return say(given.task.get("answer", "done"))
        tool, arguments = given.turns[done]
        return call((f"{name}__{tool}", dict(arguments)))

    result = await play_mcp(name, tmp_path, model)
    assert [each["reward"] for each in rollouts(result.files.groups)] == [1.0, 1.0]
    for messages in lines(result.files.groups)[0]["messages"]:
        assert given.said in [message["content"] for message in messages if message["role"] == "tool"][-1]


async def test_mcp_server_of_others_that_does_nothing_is_no_pass(tmp_path: Path) -> None:
    result = await play_mcp("git", tmp_path, lambda _: say("I have committed it."))
    assert [each["reward"] for each in rollouts(result.files.groups)] == [0.0, 0.0]


async def test_mcp_server_of_others_that_is_killed_in_mid_rollout(tmp_path: Path) -> None:
    killed = []

    def model(request: dict[str, Any]) -> Any:
        tool, arguments = MCP_TASKS["sqlite"].turns[0]
        if any(message["role"] == "tool" for message in request["messages"]):
            ended = subprocess.run(["pkill", "-9", "-f", "mcp-server-sqlite --db-path shop.db"])
            killed.append(ended.returncode == 0)
        return call((f"sqlite__{tool}", dict(arguments)))

    result = await play_mcp("sqlite", tmp_path, model, group_size=1, max_infra_retries=1)
    (found,) = rollouts(result.files.failures)
    assert killed == [True, True]
    assert (found["reward"], found["unscored_kind"], found["attempts"]) == (None, "infra_error", 2)


async def test_gymnasium(tmp_path: Path) -> None:
    way = [1, 1, 2, 2, 1, 2]  # down, down, right, right, down, right

    def model(request: dict[str, Any]) -> Any:
        taken = sum(message["role"] == "tool" for message in request["messages"])
        return call(("step", {"action": way[taken]}))

    result = await play("gymnasium:FrozenLake-v1?is_slippery=false", tmp_path, model, total_steps=1)
    found = rollouts(result.files.groups)
    assert [(each["reward"], each["turns"]) for each in found] == [(1.0, 6), (1.0, 6)]


async def test_gymnasium_without_a_render_mode_that_is_text(tmp_path: Path) -> None:
    result = await play("gymnasium:Blackjack-v1", tmp_path, lambda _: call(("step", {"action": 0})), total_steps=1)
    found = rollouts(result.files.groups)
    assert [(each["reward"] in (-1, 0, 1, 1.5), each["turns"]) for each in found] == [(True, 1)] * 2


@pytest.mark.parametrize("scheme", RECORDED)
async def test_recordings_are_what_the_packages_say(scheme: str) -> None:
    recorded = [json.loads(line) for line in (FRAMES / f"{scheme}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert await frames_of(scheme) == recorded


async def test_textarena(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        low, high = 1, 20
        guesses = [m["content"] for m in request["messages"] if m["role"] == "assistant"]
        hints = [m["content"].lower() for m in request["messages"][1:] if m["role"] == "user"]
        for guess, hint in zip(guesses, hints, strict=True):
            number = int(guess.strip("[]"))
            low, high = (number + 1, high) if "higher" in hint else (low, number - 1)
        return say(f"[{(low + high) // 2}]")

    found = rollouts((await play("textarena:GuessTheNumber-v0", tmp_path, model, total_steps=3)).files.groups)
    assert {each["reward"] for each in found} == {1.0}
    first = [group["messages"][0][0] for group in lines(tmp_path / "groups.jsonl")]
    again = await play("textarena:GuessTheNumber-v0", tmp_path / "again", model, total_steps=3)
    assert [group["messages"][0][0] for group in lines(again.files.groups)] == first


UNSOLVABLE = {
    "live_multiple": [862, 964],  # the ground truth has parameters that the function does not have
    "live_simple": [106, 112],  # no value is right for a parameter that has to be given
    "multi_turn_miss_func": [49],  # calls `tail` two turns before it is offered
    "simple_java": [36, 64, 65],  # lists of mixed values are read as text; of "epoch_millis" each letter is right
}
BFCL = [f"multi_turn_{kind}" for kind in ("base", "miss_func", "miss_param", "long_context")]
BFCL += ["simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple"]
BFCL += ["live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "irrelevance", "live_irrelevance"]


@pytest.mark.parametrize("category", BFCL)
async def test_the_ground_truth_of_bfcl_is_right_and_idleness_is_not(category: str) -> None:
    guest = GuestProcess(interpreter("bfcl", PACKAGES["bfcl"]), INSIDE / "bfcl.py", category, {})
    await guest.start()
    scores: dict[str, list[float]] = {"solved": [], "idle": []}
    try:
        for number in range(guest.about["size"]):
            item = (await guest.call("item", number=number))["item"]
            for session, found in scores.items():
                opened = await guest.call("open", session, item=item)
                said: list[dict[str, Any]] = []
                for turn in opened["solution"] if session == "solved" else ():
                    calls = turn.get("calls") or ()
                    made = [
                        {"function": {"name": each["name"], "arguments": json.dumps(each["arguments"])}}
                        for each in calls
                    ]
                    said += [{"role": "assistant", "tool_calls": made}] if made else []
                    for each in calls:
                        await guest.call("call", session, **each)
                    if "text" in turn:
                        await guest.call("act", session, text=turn["text"])
                found.append((await guest.call("score", session, messages=said))["reward"])
                await guest.call("close", session)
    finally:
        await guest.close()
    assert [number for number, each in enumerate(scores["solved"]) if each != 1.0] == UNSOLVABLE.get(category, [])
    assert set(scores["idle"]) == ({1.0} if "irrelevance" in category else {0.0})


def test_a_function_that_bfcl_withholds_is_described_in_the_turn_that_has_it(tmp_path: Path) -> None:
    given = ["bfcl:multi_turn_miss_func", "-n", "3", "-r", "1", "-c", "1", "-m", "reference", "-o", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "lachesis", "process", *given], check=True, capture_output=True)
    for group, name in zip(lines(tmp_path / "groups.jsonl"), ("sort", "mv", "cp"), strict=True):
        assert group["scores"] == [1.0]
        assert name not in {tool["function"]["name"] for tool in group["tools"]}
        said = [message["content"] for message in group["messages"][0] if message["role"] == "user"]
        assert sum(f"'name': '{name}'" in text for text in said[1:]) == 1


@pytest.mark.parametrize("standard", ["ors", "openenv"])
@pytest.mark.parametrize("solves", [True, False])
async def test_the_clients_of_others_play_what_we_serve(tmp_path: Path, standard: str, solves: bool) -> None:
    async def play_with_sdk(env_cls: Any, answer: str, command: dict[str, str], tools: list[str]) -> Any:
        calls = [[tools[0], command], ["submit", {"answer": answer}]]
        async with served(standard, env_cls, tmp_path, enabled_toolsets=tools) as url:
            program = [str(DOORS / standard / "bin/python"), str(HERE / f"{standard}_client.py")]
            arguments = [url, env_cls.name.lower(), json.dumps(calls)]
            pipe = asyncio.subprocess.PIPE
            running = await asyncio.create_subprocess_exec(*program, *arguments, stdout=pipe, stderr=pipe)
            out, log = await running.communicate()
            assert running.returncode == 0, log.decode()
            return json.loads(out)

    words = "apple\nfig\npear" if solves else "pear"
    said = await play_with_sdk(Served, "Done.", {"command": f"printf '{words}' >sorted.txt"}, ["terminal"])
    assert "pear fig apple" in said["prompt"] and said["tools"] == ["terminal", "process", "submit"]
    assert (said["rewards"], said["finished"]) == ([None, float(solves)], [False, True])

    row = gsm_symbolic(1, 0)[0]
    answer = f"It is \\boxed{{{row['answer'] if solves else -1}}}."
    said = await play_with_sdk(GSM8kAgentEnv, answer, {"code": "print(6 * 7)"}, ["python"])
    assert row["question"] in said["prompt"]
    assert (said["rewards"], said["finished"]) == ([None, float(solves)], [False, True])


GUESSES = json.dumps([["guess", {"number": 5}], ["guess", {"number": "many"}], ["guess", {"number": 7}]])
RIGHT_AT_ONCE = json.dumps([["guess", {"number": 4}], ["guess", {"number": 5}]])


@pytest.mark.parametrize("standard", ["mcp", "nemogym", "openenv", "ors", "prime"])
async def test_real_clients_send_the_frames_that_are_recorded(tmp_path: Path, standard: str) -> None:
    python = (GUESTS / "verifiers" if standard == "prime" else DOORS / standard) / "bin/python"
    if not python.exists():
        pytest.skip(f"{python} is not there: NeMo Gym needs Python 3.13, and `make test-guests` installs verifiers")
    frames: list[dict[str, Any]] = []
    taskset = Path(lachesis_doors.__file__).parent / "serving/verifiers_taskset"
    async with served_halves(standard, tmp_path) as (service, given), recorded(service.root_url, frames) as url:
        rows = tmp_path / "rows.jsonl"
        if hasattr(service, "rows"):
            rows.write_text("".join(json.dumps(row) + "\n" for row in service.rows()))
        arguments = {
            "mcp": [f"{url}/mcp/train/1", GUESSES],
            "nemogym": [url, rows, tmp_path],
            "openenv": [url, "halves", RIGHT_AT_ONCE],
            "ors": [url, "halves", RIGHT_AT_ONCE],
            "prime": [url, rows, given["http://MODEL/v1"], "scripted"],
        }[standard]
        program = [str(python), str(HERE / f"{standard}_client.py"), *map(str, arguments)]
        pipe = asyncio.subprocess.PIPE
        about = {**os.environ, "PYTHONPATH": str(taskset)}
        running = await asyncio.create_subprocess_exec(*program, stdout=pipe, stderr=pipe, env=about)
        out, log = await running.communicate()
        assert running.returncode == 0, log.decode()
    said = json.loads(out.splitlines()[-1])
    if standard == "nemogym":
        found = [(each["reward"], each["mask_sample"]) for each in said["rollouts"]]
        assert found == [(0.75, False), (0.5, False)]
        assert said["metrics"][0]["agent_metrics"] == {"masked": 0, "mean/reward": 0.625}
        assert {"NeMoGymResponseFunctionToolCallForTraining", "NeMoGymFunctionCallOutput"} == set(said["kinds"][1])
    elif standard == "prime":
        assert (said["rewards"], said["branches"], said["deltas"]) == ([0.75, 0.5], [[5], [7]], 2)
        assert [episode["ok"] for episode in said["episodes"]] == [True, True]
    elif standard == "mcp":
        assert (said["rewards"], said["finished"]) == ([None, None, 0.75], [False, False, True])
        assert (said["prompt"], said["tools"], said["reward"]) == ("Guess.", ["guess", "submit"], 0.75)
    else:
        assert (said["rewards"], said["finished"]) == ([None, 0.75], [False, True])
    if os.environ.get("RECORD"):
        keep(standard, frames, given)
    assert outline(frames) == outline(golden(standard))


async def test_a_model_server_of_nemo_gym_gives_and_takes_tokens(tmp_path: Path) -> None:
    if not (DOORS / "nemogym/bin/python").exists():
        pytest.skip("NeMo Gym is not there: it needs Python 3.13")
    async with FakeServer(guesses) as model:
        with server("nemogym", "/openapi.json", "model", model.base_url) as port:
            config = ServerConfig(base_url=f"http://127.0.0.1:{port}/v1", model_name="policy_model", max_retries=0)
            async with gym(tmp_path, config) as run:
                _, found = await run(1)
        assert (found["reward"], found["mask_sample"]) == (0.5, False)
        sampled = [(list(seen.call.prompts[0]), list(seen.completions[0].ids)) for seen in model.requests]
        assert len(sampled) == 3
        assert tokens_of(found) == sampled


READS = """
import json, sys
from nemo_gym.base_resources_server import BaseVerifyResponse
for line in sys.stdin:
    read = BaseVerifyResponse.model_validate_json(line)
    ids = [item.generation_token_ids for item in read.response.output if hasattr(item, "generation_token_ids")]
    print(json.dumps([read.mask_sample, read.failure_kind, ids]))
"""


async def test_types_of_nemo_gym_read_every_kind_of_rollout(tmp_path: Path) -> None:
    python = DOORS / "nemogym/bin/python"
    if not python.exists():
        pytest.skip("NeMo Gym is not there: it needs Python 3.13")
    answers = []
    for place, (name, choice) in enumerate((name, choice) for name in KINDS for choice in ("error", "last")):
        kind = KINDS[name]()
        async with FakeServer(kind.policy) as model:
            (tmp_path / str(place)).mkdir()
            answers.append(await verified(kind, tmp_path / str(place), model, on_branches=choice))
    given = "\n".join(map(json.dumps, answers))
    how = {"input": given, "capture_output": True, "text": True, "check": True}
    reading = await asyncio.to_thread(subprocess.run, [python, "-c", READS], **how)
    assert "unregistered failure_kind" not in reading.stderr
    for answer, line in zip(answers, reading.stdout.splitlines(), strict=True):
        trained = [list(ids) for _, ids in trained_by_nemo(answer).elements()]
        assert json.loads(line) == [answer["mask_sample"], answer.get("failure_kind"), trained]


def test_most_games_of_textarena_play_and_two_games_of_one_seed_are_alike() -> None:
    python = interpreter("textarena", PACKAGES["textarena"])
    command = [python, str(HERE / "textarena_survey.py"), str(INSIDE / "textarena.py")]
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    print(listed)
    rows = [line.split("\t") for line in listed.splitlines()]
    assert len(rows) == 238
    alike = [name for name, _, found, _ in rows if found == "alike"]
    assert len(alike) >= 185, sorted({row[0] for row in rows} - set(alike))
    assert not [name for name, _, found, _ in rows if found == "differs"]


async def test_tau2_with_a_scripted_customer_and_with_one_who_does_not_answer(tmp_path: Path) -> None:
    def model(request: dict[str, Any]) -> Any:
        task = request["messages"][-1]
        made = {"user_id": "user_1", "title": "Important Meeting"}
        return call(("create_task", made)) if task["role"] == "user" else say("Done.")

    settings = {"total_steps": 1, "group_size": 2}
    found = rollouts((await play("tau2:mock?user=scripted", tmp_path / "mock", model, **settings)).files.groups)
    assert [(each["reward"], each["turns"], each["outcome"]) for each in found] == [(1.0, 2, "completed")] * 2
    target = "tau2:airline?user=scripted"
    found = rollouts((await play(target, tmp_path / "airline", lambda _: say("No."), **settings)).files.groups)
    assert {each["outcome"] for each in found} == {"completed"}
    gone = "tau2:mock?user=http://127.0.0.1:9/v1&user_model=customer"
    lost = rollouts((await play(gone, tmp_path / "gone", model, **settings)).files.failures)
    assert {(each["reward"], each["unscored_kind"]) for each in lost} == {(None, "infra_error")}
    assert "the customer's model gave no answer" in lost[0]["reason"]


@pytest.mark.parametrize(("domain", "count", "unsolved"), [("mock", 9, [7]), ("telecom", 8, [])])
async def test_the_calls_of_tau2s_evaluation_pass_it(
    tmp_path: Path, domain: str, count: int, unsolved: list[int]
) -> None:
    chosen = {"total_steps": count, "group_size": 1, "max_agent_turns": 40, "enabled_toolsets": []}
    env = make(environment_class(f"tau2:{domain}?user=scripted"), None, tmp_path, **chosen)
    groups = lines((await env.process_manager()).files.groups)
    rewards = {group["item"]["item"]["number"]: group["rollouts"][0]["reward"] for group in groups}
    assert len(rewards) == count
    # Task 7 of mock names no calls.
    assert [number for number, reward in rewards.items() if reward != 1.0] == unsolved
