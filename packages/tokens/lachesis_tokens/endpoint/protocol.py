"""The interface between the HTTP server and the protocols, and the protocols of OpenAI and SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from backends.tasks import run_all
from lachesis_tokens.wire import openai_chat, openai_text, sglang
from lachesis_tokens.wire.request import JSON, Refused
from lachesis_tokens.wire.writing import data

if TYPE_CHECKING:
    from lachesis_tokens.endpoint.recording import Recording


class Protocol(ABC):
    """One route: what its requests ask, and how answers and errors are written. It has no state."""

    ping: ClassVar[bytes] = b": waiting for the model\n\n"
    """Sent while a stream waits."""

    @abstractmethod
    async def complete(self, body: JSON, recording: Recording) -> JSON:
        """The whole answer. Raises `Refused`, `MessageError`, or what the recording raises."""

    def body(self, answer: JSON) -> Any:
        """The answer as JSON."""
        return answer

    @abstractmethod
    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        """The answer as server-sent events."""

    @abstractmethod
    def error(self, refused: Refused) -> JSON:
        """The body of an error."""

    def error_event(self, refused: Refused) -> bytes:
        """An error in a stream that has begun."""
        return data(self.error(refused))


class RecordedChatRoute(Protocol):
    """The chat route of OpenAI."""

    async def complete(self, body: JSON, recording: Recording) -> JSON:
        request = openai_chat.read(body)
        return openai_chat.answer(
            await recording.chat(request), recording.token_names if body.get("logprobs") else None
        )

    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        return openai_chat.chunks(answer, include_usage=openai_chat.wants_usage(body))

    def error(self, refused: Refused) -> JSON:
        return openai_chat.error(refused)


class RecordedTextRoute(Protocol):
    """The text route of OpenAI."""

    async def complete(self, body: JSON, recording: Recording) -> JSON:
        asked = await run_all(recording.text(request) for request in openai_text.read(body))
        return openai_text.answer(asked, recording.token_names if body.get("logprobs") is not None else None)

    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        return openai_text.chunks(answer, include_usage=openai_chat.wants_usage(body))

    def error(self, refused: Refused) -> JSON:
        return openai_chat.error(refused)


class RecordedGenerateRoute(Protocol):
    """SGLang's native route."""

    async def complete(self, body: JSON, recording: Recording) -> JSON:
        request = sglang.read(body)
        answers = [sglang.write(body, response, recording.token_names) for response in await recording.text(request)]
        return answers[0] if request.n == 1 else {"answers": answers}

    def events(self, body: JSON, answer: JSON) -> Iterator[bytes]:
        return sglang.chunks(answer.get("answers", [answer]))

    def body(self, answer: JSON) -> Any:
        """A list for `n` > 1."""
        return answer.get("answers", answer)

    def error(self, refused: Refused) -> JSON:
        return sglang.error(refused)
