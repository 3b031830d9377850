"""Files to be created: 1.0 for the content, 0.5 for a file that contains it, nothing for nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lachesis.settings.server_settings import ServerConfig
from lachesis_envs.terminal_test import EVAL_ITEMS, TRAIN_ITEMS, TerminalTestEnv
from tests.support.scripted_server import ScriptedServer, call, say
from tests.support.small_envs import make, rollouts


def writes(content: str) -> Any:
    """A model that writes `content`, with the wanted one in the place of `{}`."""

    def play(request: dict[str, Any]) -> Any:
        if request["messages"][-1]["role"] == "tool":
            return say("Done.")
        asked = next(message["content"] for message in request["messages"] if message["role"] == "user")
        item = next(item for item in (*TRAIN_ITEMS, *EVAL_ITEMS) if f" {item['path']} " in asked)
        return call(("write_file", {"path": item["path"], "content": content.replace("{}", item["content"])}))

    return play


@pytest.mark.parametrize(
    ("content", "reward"), [("{}", 1.0), ("{}\n", 1.0), ("Here it is:\n{}", 0.5), ("nothing of that", 0.0)]
)
async def test_what_a_file_earns(tmp_path: Path, content: str, reward: float) -> None:
    async with ScriptedServer(writes(content)) as server:
        result = await make(TerminalTestEnv, server, tmp_path, total_steps=3, group_size=1).process_manager()
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [reward] * 3


async def test_no_file_earns_nothing(tmp_path: Path) -> None:
    async with ScriptedServer([say("It is done, believe me.")]) as server:
        result = await make(TerminalTestEnv, server, tmp_path, total_steps=1).process_manager()
    assert [rollout["reward"] for rollout in rollouts(result.files.groups)] == [0.0, 0.0]


async def test_evaluation_has_tools_and_items_of_its_own(tmp_path: Path) -> None:
    async with ScriptedServer(writes("{}")) as server:
        result = await make(TerminalTestEnv, server, tmp_path)._run_evaluate()
    assert (result.summary.items, result.summary.reward.mean) == (len(EVAL_ITEMS), 1.0)
    assert {"terminal", "write_file"} <= {tool["function"]["name"] for tool in server.requests[0]["tools"]}
    assert all(request["temperature"] == 0.0 for request in server.requests)


async def test_the_reference_policy_earns_everything(tmp_path: Path) -> None:
    config = TerminalTestEnv.env_config_cls(total_steps=3, data_path_to_save_groups=str(tmp_path / "groups.jsonl"))
    result = await TerminalTestEnv(config, [ServerConfig(model_name="reference")]).process_manager()
    assert result.summary.reward.mean == 1.0
