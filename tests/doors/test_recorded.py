"""A game of TextArena and a conversation of BFCL, played offline: recordings of what their packages say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from lachesis_doors.processes import Package, ProcessEnv
from tests.doors.real.record_frames import FRAMES, RECORDED, guesses
from tests.support.scripted_server import call, say
from tests.support.small_envs import lines, process, rollouts

RECORDINGS = {scheme: [json.loads(line) for line in (FRAMES / f"{scheme}.jsonl").open()] for scheme in RECORDED}


class RecordedEnv(ProcessEnv):
    package = Package("json", "json")
    script: ClassVar[Path] = Path(__file__).with_name("recorded_guest.py")


def agent(scheme: str) -> Any:
    """Says what was said for the recording."""
    solution = RECORDINGS[scheme][2]["value"]["solution"]

    def model(request: dict[str, Any]) -> Any:
        if solution is None:
            return say(guesses([m["content"] for m in request["messages"][1:] if m["role"] == "user"]))
        turn = solution[sum(message["role"] == "assistant" for message in request["messages"])]
        if "text" in turn:
            return say(turn["text"])
        return call(*((each["name"], each["arguments"]) for each in turn["calls"]))

    return model


@pytest.mark.parametrize("scheme", RECORDED)
async def test_a_recorded_environment_plays_as_its_package_did(tmp_path: Path, scheme: str) -> None:
    frames = RECORDINGS[scheme]
    asked: list[dict[str, Any]] = []

    def model(request: dict[str, Any]) -> Any:
        asked.append(request)
        return agent(scheme)(request)

    target = f"{scheme}:{RECORDED[scheme][0]}?frames={FRAMES / scheme}.jsonl"
    settings = {"total_steps": 1, "group_size": 1, "max_agent_turns": 60, "enabled_toolsets": []}
    result = await process(RecordedEnv.at(target), tmp_path, model, **settings)
    (rollout,) = rollouts(result.files.groups)
    assert (rollout["reward"], rollout["outcome"]) == (frames[-1]["value"]["reward"], "completed") == (1.0, "completed")
    offered = [tool["function"] for tool in asked[0].get("tools") or ()]
    assert offered == [
        {key: tool[key] for key in ("name", "description", "parameters")}
        for tool in frames[1]["value"].get("tools", ())
    ]
    (messages,) = lines(result.files.groups)[0]["messages"]
    said = [frame["value"]["text"] for frame in frames if frame["call"] == "call"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == said
    heard = [frame["value"]["text"] for frame in frames if frame["call"] == "act" and frame["value"]]
    users = [message["content"] for message in messages if message["role"] == "user"]
    assert users[1:] == [text for text in heard if text]


@pytest.mark.parametrize("scheme", RECORDED)
async def test_another_call_than_the_recorded_one_is_an_error_of_the_recording(tmp_path: Path, scheme: str) -> None:
    target = f"{scheme}:{RECORDED[scheme][0]}?frames={FRAMES / scheme}.jsonl"
    settings = {"total_steps": 1, "group_size": 1, "enabled_toolsets": []}
    result = await process(RecordedEnv.at(target), tmp_path, lambda _: say("something else"), **settings)
    (rollout,) = rollouts(result.files.failures)
    assert rollout["reward"] is None and "was not recorded" in rollout["traceback"]
