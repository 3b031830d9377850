"""Environments of the atroposlib source distribution, unmodified, through the command line.

Their files are not in this tree: `scripts/atropos-environments.sh` downloads them into the cache.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.atropos_catalogue import CASES
from benchmarks.atropos_environments import GROUPS, Played, distribution, play

pytestmark = pytest.mark.long
NAMES = (
    "gsm8k_server.GSM8kEnv",  # returns the nodes of managed_server
    "gsm8k_server_axolotl.GSM8kEnv",  # encodes the conversation again
    "rlaif_server.RLAIFEnv",  # asks judges, whose completions are no samples
    "tool_use_turnlevel_advantage_server.MultiTurnToolUseTurnLevelAdvantageEnv",  # turns, and an advantage for each
    "game_environments.gymnasium.blackjack.blackjack_env_no_thinking.BlackjackEnvNoThinking",  # steps of a game
)
"""One of each kind: a process of each takes four seconds to import its packages. `make test-atropos` plays all."""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    root = distribution()
    if root is None:
        pytest.skip("the source distribution of atroposlib is not in the cache: scripts/atropos-environments.sh")
    folder = tmp_path_factory.mktemp("atropos")

    async def all_of_them() -> list[Played]:
        free = asyncio.Semaphore(2)

        async def one(name: str) -> Played:
            (case,) = [case for case in CASES if case.name == name]
            async with free:
                return await play(case, root, folder / name)

        return list(await asyncio.gather(*map(one, NAMES)))

    return dict(zip(NAMES, asyncio.run(all_of_them()), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_plays_two_groups_and_every_sampled_token_of_them_has_a_certificate(
    name: str, played: dict[str, Played], tmp_path: Path
) -> None:
    result = played[name]
    assert result.exit_code == 0, result.output[-3000:]
    assert result.groups == GROUPS, result.output[-3000:]
    assert result.certified
    assert result.drift["samples"] == result.scored > 0


def test_environments_that_encode_text_again_return_other_tokens_than_were_sampled(played: dict[str, Played]) -> None:
    differ = {name for name, result in played.items() if result.drift["differing"]}
    assert "gsm8k_server.GSM8kEnv" not in differ, "it returns the nodes of managed_server"
    assert "gsm8k_server_axolotl.GSM8kEnv" in differ, "it encodes the conversation again"
