"""ChatPlaces of a chat to go back to: the conversation, and the sandbox as it was there."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends import BackendUnavailable, LachesisError, SandboxCheckpoint, SupportsRestore
from backends.errors import SettingsError
from lachesis_messages.history import MessageHistory
from lachesis_messages.messages import Message
from lachesis_messages.responses import ChatResponse
from lachesis_tools import ToolSession


@dataclass(frozen=True, slots=True)
class _Place:
    messages: tuple[Message, ...]
    checkpoint: SandboxCheckpoint
    ran: int
    """`Journal.ran` there."""


@dataclass(slots=True)
class ChatPlaces:
    """What `/checkpoint` has kept, by name."""

    kept: dict[str, _Place] = field(default_factory=dict)

    async def keep(
        self, name: str, session: ToolSession, history: MessageHistory, response: ChatResponse | None, ran: int
    ) -> None:
        """Keep this place. `response` is the answer that is not in `history` yet.

        Raises:
            SettingsError: something runs in the sandbox, or its backend cannot go back.
        """
        try:
            checkpoint = await (await _sandbox(session)).checkpoint()
        except LachesisError as error:
            raise SettingsError(str(error)) from None
        now = [node.message for node in history.nodes()]
        self.kept[name] = _Place((*now, *([response.message] if response else [])), checkpoint, ran)

    async def go_back(self, name: str, session: ToolSession, history: MessageHistory) -> tuple[int, int]:
        """Bring the sandbox back to a place: how many messages the conversation had there, and what had run.

        Raises:
            SettingsError: there is no such place, or the conversation has gone another way before it.
        """
        place = self.kept.get(name)
        if place is None:
            raise SettingsError(f"write /back NAME, with a name of /checkpoint: {', '.join(self.kept) or 'none yet'}")
        now = [node.message for node in history.nodes()][: len(place.messages)]
        # The last of them may be the answer that is not in `history` yet.
        if [*place.messages[: len(now)]] != now or len(now) < len(place.messages) - 1:
            raise SettingsError(f"messages before {name} were taken back: that place is in another conversation")
        try:
            await (await _sandbox(session)).restore(place.checkpoint)
        except LachesisError as error:
            raise SettingsError(str(error)) from None
        return len(place.messages), place.ran


async def _sandbox(session: ToolSession) -> SupportsRestore:
    sandbox = await session.sandbox()
    if not isinstance(sandbox, SupportsRestore):
        raise BackendUnavailable("sandboxes of this backend cannot go back. Next step: use backend 'local'")
    return sandbox
