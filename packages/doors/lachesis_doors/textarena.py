"""The door of TextArena: games for one player, and for several, of whom one is the agent.

textarena:Sudoku-v0                                                              a game for one player
textarena:TicTacToe-v0?opponent=random                                           legal moves, drawn
textarena:TicTacToe-v0?opponent=policy                                           the agent's own model
textarena:TicTacToe-v0?opponent=http://HOST:PORT/v1&opponent_model=NAME          another model
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from backends.errors import SettingsError
from lachesis.runs.model_servers import server_of
from lachesis.settings.server_settings import ServerConfig
from lachesis_client import InferenceError, Router
from lachesis_client.failed_requests import failed_requests
from lachesis_doors.door_env import DoorSession
from lachesis_doors.guest_process import INSIDE, GuestLost
from lachesis_doors.processes import PACKAGES, ProcessEnv
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_tools import ToolSession


class TextArenaEnv(ProcessEnv):
    """A game of TextArena. With several players, the agent has another seat with each item.

    What an opponent writes is context of the agent as far as the game shows it, and never a sample: with
    `opponent=policy`, only the agent's own seat is trained.
    """

    package = PACKAGES["textarena"]
    script = INSIDE / "textarena.py"

    async def setup(self) -> None:
        opponent = self.arguments.get("opponent")
        self._opponent: Callable[[], Any] | None = None
        self._closing = AsyncExitStack()
        if opponent == "policy":
            self._opponent = lambda: self.player.server.for_rollout()
        elif str(opponent).startswith(("http://", "https://")):
            if "opponent_model" not in self.arguments:
                raise SettingsError(f"{self.name}: name the model at {opponent}, as &opponent_model=NAME")
            config = ServerConfig(base_url=opponent, model_name=str(self.arguments["opponent_model"]))
            router = await self._closing.enter_async_context(Router([server_of(config, tool_call_parser=None)]))
            self._opponent = router.for_rollout
        elif opponent not in (None, "random"):
            raise SettingsError(f"{self.name}: opponent={opponent}: write random, policy, or the URL of a server")
        await super().setup()

    async def teardown(self) -> None:
        await super().teardown()
        await self._closing.aclose()

    @asynccontextmanager
    async def opened(self, item: Any, tools: ToolSession) -> AsyncIterator[DoorSession]:
        async with super().opened(item, tools) as inner:
            if self._opponent is None:
                yield inner
                return
            game = _Game(inner, self._opponent(), self._asked)
            opening: Any = inner.prompt
            if not isinstance(opening, str):
                game.prompt = (await game.until_asked(opening))["text"]
            yield game

    async def _asked(self, server: Any, messages: MessageHistory) -> str:
        """The answer of an opponent, which is appended to its conversation.

        Raises:
            GuestLost: it gave none. That is not the agent's doing, whatever the reason is.
        """
        try:
            with failed_requests():  # the outcome tells of these
                said = await server.chat(messages, temperature=self.config.agent_temperature)
        except InferenceError as error:
            raise GuestLost(f"{self.name}: the opponent made no move: {error}") from error
        messages.append(said)
        return str(said.message.text)


class _Game:
    """A session in which models have the other seats."""

    solution = None

    def __init__(self, inner: DoorSession, server: Any, asked: Callable[[Any, MessageHistory], Any]) -> None:
        self.prompt = inner.prompt
        self._inner, self._server, self._asked = inner, server, asked
        self._seats: dict[int, MessageHistory] = {}
        """The conversations of the opponents."""

    async def act(self, text: str) -> Mapping[str, Any] | None:
        answer: Mapping[str, Any] | None = await self.until_asked(await self._inner.act(text))
        return answer

    async def until_asked(self, answer: Mapping[str, Any] | None) -> Any:
        """The answer that is for the agent."""
        while answer is not None and (ask := answer.get("ask")):
            messages = self._seats.setdefault(ask["seat"], MessageHistory())
            messages.append(Message("user", ask["text"]))
            answer = await self._inner.act(await self._asked(self._server, messages))
        return answer

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._inner.call(name, arguments)

    async def score(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        return await self._inner.score(messages)


def door(target: str) -> type[TextArenaEnv]:
    """The class for `textarena:ID`."""
    return TextArenaEnv.at(target)
