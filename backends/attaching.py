"""Streams to an executor of a session: dialled, and handed over when both ends have proved that they know its token."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from .byte_stream import Attachment, ByteStream, Unreachable
from .errors import SandboxLost
from .executor.framing import PROTOCOL, Delivery, encode, token_proof

_HANDSHAKE = 10.0  # seconds for a handshake
_STAGGER = 1.0  # seconds after which another stream is tried beside a silent one
_HANDSHAKES = 16  # handshakes at once

Dial = Callable[[], Awaitable[ByteStream]]
"""Makes a stream to the executor. Raises an `Exception` when that fails for now, `SandboxLost` when it is final."""


class _UnknownSession(Exception):
    """The peer does not know the session."""


class _Answered(NamedTuple):
    attachment: Attachment
    received: int
    """How many of our frames the executor has."""
    hello: dict[str, Any]


class Attaching:
    """Makes the attachments of one session, one after the other."""

    def __init__(self, dial: Dial, delivery: Delivery, *, sealed: bool) -> None:
        """`delivery` keeps the frames of the session; see `Connection.resumable` for the others."""
        self._dial, self._delivery, self._sealed = dial, delivery, sealed
        self._token = secrets.token_bytes(32)
        self._known = False  # whether the executor has the token

    async def attach(self, seconds: float) -> tuple[Attachment, dict[str, Any]]:
        """Dial until the handshake with our executor succeeds: the stream, and the executor's greeting.

        Handshakes overlap, so that a silent peer does not keep the executor out.

        Raises:
            Unreachable: `seconds` are over.
            SandboxLost: `dial` raised it, or the executor was restarted.
        """
        end = time.monotonic() + seconds
        dial_at, backoff, unknown_since = 0.0, 0.05, 0.0
        reason = "there is no answer"
        dialling: asyncio.Task[ByteStream] | None = None
        handshakes: set[asyncio.Task[_Answered]] = set()
        try:
            while (now := time.monotonic()) < end:
                if dialling is None and now >= dial_at and len(handshakes) < _HANDSHAKES:
                    dialling = asyncio.ensure_future(_awaited(self._dial))
                wake = end if dialling is not None else min(end, dial_at)
                await _first([*handshakes, *([dialling] if dialling else [])], wake - now)
                for handshake in [task for task in handshakes if task.done()]:
                    handshakes.discard(handshake)
                    error = handshake.exception()
                    if error is None:
                        attachment, received, hello = handshake.result()
                        try:
                            self._delivery.forget(received)
                        except ValueError as wrong:
                            attachment.stream.abort()
                            error = wrong
                        else:
                            self._known = True
                            return attachment, hello
                    reason = str(error) or type(error).__name__
                    dial_at = min(dial_at, time.monotonic() + 0.05)
                    if isinstance(error, _UnknownSession):  # any peer can claim that: wait for more claims
                        unknown_since = unknown_since or time.monotonic()
                        if time.monotonic() - unknown_since > 2.0:
                            raise SandboxLost(reason)
                if dialling is not None and dialling.done():
                    error, task, dialling = dialling.exception(), dialling, None
                    if error is None:
                        handshakes.add(asyncio.create_task(self._shake_hands(task.result())))
                        dial_at = time.monotonic() + _STAGGER
                    elif isinstance(error, SandboxLost) or not isinstance(error, Exception):
                        raise error
                    else:
                        reason = str(error) or type(error).__name__
                        dial_at = time.monotonic() + backoff
                        backoff = min(1.0, 2 * backoff)
            raise Unreachable(reason)
        finally:
            for handshake in handshakes:
                handshake.cancel()
            if dialling is not None:
                dialling.add_done_callback(_abandon)
                dialling.cancel()

    async def _shake_hands(self, stream: ByteStream) -> _Answered:
        """Prove the token to each other."""
        attachment = Attachment(stream)
        try:
            async with asyncio.timeout(_HANDSHAKE):
                hello, _, _ = await attachment.next()
                if hello.get("hello") != PROTOCOL:
                    raise ValueError(f"the executor speaks protocol {hello.get('hello')!r} instead of {PROTOCOL}")
                far, near = str(hello["nonce"]), secrets.token_hex(16)
                taken = self._delivery.received
                answer = {"id": 0, "attach": PROTOCOL, "nonce": near, "received": taken}
                facts = (far, near, taken, int(self._sealed))
                if not hello["fresh"]:
                    answer["proof"] = token_proof(self._token, "near", *facts)
                elif not self._known:
                    answer["token"] = self._token.hex()  # no command has run there that could intercept it
                else:
                    raise _UnknownSession("its executor does not know the session: it was restarted")
                attachment.write(encode({**answer, "sealed": int(self._sealed)}))
                reply, _, _ = await attachment.next()
                received = int(reply["received"])
                proof = token_proof(self._token, "far", *facts, received)
                if not hmac.compare_digest(proof, str(reply["proof"])):
                    raise ValueError("the peer is not its executor")
                if self._sealed:
                    attachment.frames.seal(self._token, far, near, b"near", b"far")
                return _Answered(attachment, received, hello)
        except BaseException as error:
            with contextlib.suppress(Exception):
                stream.abort()
            if isinstance(error, TimeoutError):
                raise TimeoutError("the peer is silent") from None
            if isinstance(error, LookupError | TypeError):
                raise ValueError("the peer is not an executor") from None
            raise


async def _awaited(dial: Dial) -> ByteStream:
    return await dial()


async def _first(tasks: list[asyncio.Task[Any]], seconds: float) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=max(0.0, seconds), return_when=asyncio.FIRST_COMPLETED)
    else:
        await asyncio.sleep(max(0.0, seconds))


def _abandon(dialling: asyncio.Task[ByteStream]) -> None:
    """Close a stream that came too late."""
    if not dialling.cancelled() and dialling.exception() is None:
        with contextlib.suppress(Exception):
            dialling.result().abort()
