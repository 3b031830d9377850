"""The recorded frames of real clients, against servers of ours: `make test-doors RECORD=1` records them again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lachesis.settings.server_settings import ServerConfig
from tests.doors.frames import golden, replay
from tests.doors.test_serving import Numbers, serving
from tests.support.scripted_server import ScriptedServer, call


class Halves(Numbers):
    """With short answers."""

    name = "halves"
    wrong = "wrong"


def halving(request: dict[str, Any]) -> Any:
    """A model whose server reports tokens as NeMo Gym's do."""
    turn = sum(message["role"] == "assistant" for message in request["messages"])
    tokens = {
        "prompt_token_ids": list(range(10 + 5 * turn)),
        "generation_token_ids": [10 + 5 * turn, 11 + 5 * turn],
        "generation_log_probs": [-0.5, -0.25],
    }
    return call(("guess", {"number": (6, 5, 7)[turn]}), **tokens)


@asynccontextmanager
async def served_halves(standard: str, folder: Path) -> AsyncIterator[tuple[Any, dict[str, str]]]:
    """A server of two tasks, and the names of addresses in recordings."""
    async with ScriptedServer(halving) as model:
        config = ServerConfig(base_url=model.base_url, model_name="scripted", max_retries=0)
        async with serving(standard, Halves, folder, config, enabled_toolsets=[]) as service:
            yield service, {"http://MODEL/v1": model.base_url}


@pytest.mark.parametrize("standard", ["mcp", "nemogym", "openenv", "ors", "prime"])
async def test_what_a_real_client_said_is_answered_as_it_was(tmp_path: Path, standard: str) -> None:
    async with served_halves(standard, tmp_path) as (service, given):
        await replay(service.root_url, golden(standard), given)
    assert Halves.open_sessions == 0
