"""The owner's end of the executor's protocol: numbered requests and their answers.

A connection over one stream is lost with that stream. A resumable connection dials again when its stream breaks: no
request is executed twice and no answer is lost. A lost connection stays lost, and every request, pending or new, raises
`SandboxLost` with the same reason. The package `executor` describes the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from backends.tasks import has_failed

from . import answers
from .base import INSIDE, BackendError, SandboxExhausted, SandboxLost
from .byte_stream import Attachment
from .byte_stream import ByteStream as ByteStream
from .byte_stream import asyncio_stream as asyncio_stream
from .executor.framing import CHUNK, PROTOCOL, Delivery, encode, token_proof

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds, beyond the time that a request may take, after which a silent executor counts as lost."""
GRACE = 60.0
"""Seconds within which a broken connection can be restored."""

_PING, _IDLE = 5.0, 3  # seconds between pings while requests are pending; that many times longer otherwise
_STARVED = 5  # of ten periods in which the limit of processor time holds a silent executor back: it is starved
_UNANSWERED = 3  # pings in a row without an answer before the stream is aborted
_HANDSHAKE = 10.0  # seconds for a handshake
_DAMAGED = 0.05  # seconds after a damaged stream before it is replaced: a peer may damage every one
_STAGGER = 1.0  # seconds after which another stream is tried beside a silent one
_HANDSHAKES = 16  # handshakes at once


Dial = Callable[[], Awaitable[ByteStream]]
"""Makes a stream to the executor. Raises an `Exception` when that fails for now, `SandboxLost` when it is final."""


@dataclass(slots=True)
class _Pending:
    op: str
    room: int
    answer: asyncio.Future[tuple[dict[str, Any], bytes]]
    data: bytearray = field(default_factory=bytearray)

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        """A frame of the answer. Raises `ValueError` if it is none."""
        if len(self.data) + len(payload) > self.room:
            raise ValueError(f"its answer to {self.op!r} has more than {self.room} bytes")
        if header.get("more"):
            self.data += payload
            return
        answers.check(self.op, header)
        self.answer.set_result((header, bytes(self.data + payload) if self.data else payload))


class _Unreachable(Exception):
    """No handshake succeeded in time. The message says why."""


class _UnknownSession(Exception):
    """The peer does not know the session."""


class Connection:
    """The connection to one executor. It belongs to the event loop that created it."""

    def __init__(self, stream: ByteStream) -> None:
        """Connect over one stream to an executor without a mode. The connection ends with the stream."""
        self._set_up()
        self._attachment: Attachment | None = Attachment(stream)
        self._begin(self._attachment)

    def _set_up(self) -> None:
        loop = asyncio.get_running_loop()
        self._pending: dict[int, _Pending] = {}
        self._last = 0
        self._room = CHUNK  # the most that a request has allowed its answer
        self._lost: str | None = None
        self._loss: type[SandboxLost] = SandboxLost
        self._last_dial: type[SandboxLost] = SandboxLost
        self._goodbye: str | None = None
        self._leaving = False
        self.hello: asyncio.Future[dict[str, Any]] = loop.create_future()
        """The executor's greeting: `python` (its version, three integers), `pid`."""
        self.ended: asyncio.Future[str | None] = loop.create_future()
        """Done when nothing more will arrive, with the reason if it is known."""
        self.throttled: Callable[[], Awaitable[int]] | None = None
        """Gives the number of periods, of a tenth of a second, in which the limit of processor time has held the inside
        back so far."""
        self.home = "/"
        """The home folder with which the inside was initialised."""
        # Resumable connections only:
        self._dial: Dial | None = None
        self._name, self._grace, self._sealed = "the sandbox", GRACE, False
        self._token = b""
        self._known = False  # whether the executor has the token
        self._delivery = Delivery()
        self._cut_at: float | None = None
        self._interrupted = 0.0
        self._unanswered = 0  # pings
        self._ticks = 0
        self._ticker: asyncio.TimerHandle | None = None

    @classmethod
    async def resumable(
        cls,
        dial: Dial,
        *,
        name: str = "the sandbox",
        grace: float = GRACE,
        start_timeout: float = 60.0,
        sealed: bool = False,
    ) -> Connection:
        """Connect to an executor in mode `--dial` or `--listen`. Returns after the first attachment.

        `dial` makes a stream, now and after every cut. When a stream is not replaced within `grace` seconds, the
        connection is lost. With `sealed`, frames carry tags: use it for streams that pass through a process of the
        sandbox, as with `--relay`. Error messages begin with `name`.

        Raises:
            BackendError: the executor could not be reached within `start_timeout` seconds.
            SandboxLost: `dial` raised it.
        """
        self = cls.__new__(cls)
        self._set_up()
        self._dial, self._name, self._grace, self._sealed = dial, name, grace, sealed
        self._token = secrets.token_bytes(32)
        self._attachment = None
        try:
            attachment = await self._attach(start_timeout)
        except _Unreachable as error:
            raise BackendError(f"{name} could not be reached within {start_timeout:g} s: {error}") from None
        self._begin(attachment)
        self._tick()
        return self

    def _begin(self, attachment: Attachment) -> None:
        self._task = asyncio.create_task(self._serve(attachment))
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[str | None]) -> None:
        reason = None if has_failed(task) else task.result()
        if not self.ended.done():  # cancelled, where the event loop has ended first
            self.ended.set_result(reason)
        if self._dial is not None:
            self.fail(f"{self._name} is gone: {reason or 'its event loop has ended'}", self._last_dial)

    @property
    def lost(self) -> str | None:
        """Why the connection is lost, None while it is not."""
        return self._lost

    @property
    def interrupted(self) -> float:
        """Seconds so far without a stream. 0 where streams pass through a process inside, which can break them."""
        if self._sealed:
            return 0.0
        return self._interrupted + (0.0 if self._cut_at is None else time.monotonic() - self._cut_at)

    async def guard(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of `call`, which uses the sandbox in another way than by requests. A lease may refuse it."""
        return await call

    async def request(
        self, op: str, payload: bytes = b"", *, patience: float | None = PATIENCE, room: int = CHUNK, **fields: Any
    ) -> tuple[dict[str, Any], bytes]:
        """Send a request and wait for its answer, with at most `room` bytes besides its header. Cancelling the call
        cancels the request inside.

        Raises:
            SandboxLost: the connection is lost, or no answer came within `patience` seconds (None: no limit), including
                interruptions; or the answer does not fit the request.
            OSError: the error of the file system or the process table.
            BackendError: the executor failed.
        """
        if self._lost is not None:
            raise self._loss(self._lost)
        self._last += 1
        number = self._last
        pending = self._pending[number] = _Pending(op, room, asyncio.get_running_loop().create_future())
        self._room = max(self._room, room)
        if self._attachment is not None:
            self._attachment.room = self._room
        try:
            async with asyncio.timeout(patience):
                self._write(encode({"id": number, "op": op, **fields}, payload))
                header, data = await pending.answer
        except TimeoutError:
            reason, loss = await self._silence(f"its executor has not answered {op!r} for {patience:g} s")
            self.fail(reason, loss)
            raise self._loss(self._lost or reason) from None
        except asyncio.CancelledError:
            self.post("cancel", target=number)
            raise
        finally:
            self._pending.pop(number, None)
            if pending.answer.done() and not pending.answer.cancelled():
                pending.answer.exception()  # retrieved, so that asyncio does not complain
        error = header.get("error")
        if error is None:
            return header, data
        if error["errno"] is None:
            raise BackendError(f"the executor failed at {op!r}: {answers.shown(error['message'])}")
        path = error.get("path") and error["path"][: answers.LONGEST]
        reported = OSError(error["errno"], answers.shown(error["message"]), path)
        reported.add_note(INSIDE)
        raise reported

    async def _silence(self, reason: str) -> tuple[str, type[SandboxLost]]:
        """Why nothing is answered, and whose doing that is."""
        if self.throttled is None:
            return reason, SandboxLost
        before = await self.throttled()
        await asyncio.sleep(1.0)
        if await self.throttled() - before < _STARVED:
            return reason, SandboxLost
        return f"{reason}: what runs inside takes all of its processor time (cpus)", SandboxExhausted

    def post(self, op: str, **fields: Any) -> None:
        """Send a message without an answer: `cancel`, `drop`, `shutdown`. Does nothing on a lost connection."""
        if self._lost is None:
            self._leaving = self._leaving or op == "shutdown"
            self._write(encode({"op": op, **fields}))

    def shut_down(self) -> None:
        """Make the executor end with everything inside. Then `ended` is done."""
        self.post("shutdown")

    def fail(self, reason: str, loss: type[SandboxLost] = SandboxLost) -> None:
        """Mark the connection as lost: every request raises `loss(reason)`. The first reason is kept."""
        if self._lost is None:
            self._lost, self._loss = reason, loss
        for pending in self._pending.values():
            if not pending.answer.done():
                pending.answer.set_exception(self._loss(self._lost))
        if self._ticker is not None:
            self._ticker.cancel()
        self._drop_stream()
        self._delivery.retained.clear()
        if self._task is not asyncio.current_task():
            self._task.cancel()

    # sending

    def _write(self, frame: bytes) -> None:
        if self._dial is not None:
            self._delivery.retain(frame)
        if self._attachment is not None:
            self._attachment.write(frame)

    def _acknowledge(self, **more: Any) -> None:
        if self._attachment is not None:
            self._attachment.write(self._delivery.acknowledgement(**more))

    def _tick(self) -> None:
        """Ping, and abort a stream whose pings stay unanswered.

        This detects networks that drop everything silently, and relays that a process inside has stopped. An executor
        that kills many processes is silent for up to 5 s.
        """
        self._ticker = asyncio.get_running_loop().call_later(_PING, self._tick)
        self._ticks += 1
        if self._attachment is None or not (self._pending or self._ticks % _IDLE == 0):
            return
        self._unanswered += 1
        if self._unanswered > _UNANSWERED:
            self._attachment.stream.abort()
        else:
            self._acknowledge(ping=True)

    # receiving

    async def _serve(self, attachment: Attachment) -> str | None:
        """Serve the first stream and all that replace it. Returns why nothing more will arrive, if that is known."""
        while True:
            attachment.room = self._room
            try:
                cut = await self._read(attachment)
            except SandboxLost as error:
                return str(error)
            finally:
                self._drop_stream()
            if self._dial is None:
                return self._goodbye if cut is None else cut
            if cut is not None:
                await asyncio.sleep(_DAMAGED)
            if self._goodbye is not None or self._leaving:
                return self._goodbye or "it was shut down"
            try:
                attachment = await self._attach(self._grace)
            except _Unreachable as error:
                reason = f"its connection broke and could not be restored within {self._grace:g} s: {error}"
                reason, self._last_dial = await self._silence(reason)
                return reason
            except SandboxLost as error:
                self._last_dial = type(error)
                return str(error)

    async def _read(self, attachment: Attachment) -> str | None:
        """Read until the stream ends. Returns a description if it is damaged.

        Raises:
            SandboxLost: whole frames are wrong: the executor itself is not to be trusted any more.
        """
        try:
            while True:
                header, payload, size = await attachment.next()
                self._unanswered = 0
                if header.get("id") == 0:
                    self._control(header)
                    continue
                self._delivery.receive(size)
                pending = self._pending.get(header["id"])
                if pending is not None and not pending.answer.done():  # else the caller was cancelled
                    try:
                        pending.take(header, payload)
                    except ValueError as error:
                        raise SandboxLost(f"its executor is not one ({error})") from None
                if self._dial is not None and self._delivery.is_due():
                    self._acknowledge()
        except SandboxLost:
            raise
        except (ValueError, LookupError, TypeError) as error:
            return f"its stream is damaged ({error})"
        except Exception:  # a broken stream may raise anything
            return None

    def _control(self, header: dict[str, Any]) -> None:
        if "bye" in header:
            self._goodbye = answers.shown(header["bye"])
        if "hello" in header and not self.hello.done():
            self.hello.set_result(header)
        if "ack" in header and self._dial is not None:
            self._delivery.forget(header["ack"])

    def _drop_stream(self) -> None:
        if self._attachment is not None:
            with contextlib.suppress(Exception):
                self._attachment.stream.abort()
            self._attachment = None
            self._cut_at = time.monotonic()

    # attaching

    async def _attach(self, seconds: float) -> Attachment:
        """Dial until the handshake with our executor succeeds, and send again the frames that it has not received.

        Handshakes overlap, so that a silent peer does not keep the executor out.

        Raises:
            _Unreachable: `seconds` are over.
            SandboxLost: `dial` raised it, or the executor was started again.
        """
        assert self._dial is not None
        end = time.monotonic() + seconds
        dial_at, backoff, unknown_since = 0.0, 0.05, 0.0
        reason = "there is no answer"
        dialling: asyncio.Task[ByteStream] | None = None
        handshakes: set[asyncio.Task[tuple[Attachment, int]]] = set()
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
                        attachment, received = handshake.result()
                        try:
                            self._resume(attachment, received)
                        except ValueError as wrong:
                            attachment.stream.abort()
                            error = wrong
                        else:
                            return attachment
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
            raise _Unreachable(reason)
        finally:
            for handshake in handshakes:
                handshake.cancel()
            if dialling is not None:
                dialling.add_done_callback(_abandon)
                dialling.cancel()

    async def _shake_hands(self, stream: ByteStream) -> tuple[Attachment, int]:
        """Prove the token to each other. Returns the attachment and how many of our frames the executor has."""
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
                if not self.hello.done():
                    self.hello.set_result(hello)
                return attachment, received
        except BaseException as error:
            with contextlib.suppress(Exception):
                stream.abort()
            if isinstance(error, TimeoutError):
                raise TimeoutError("the peer is silent") from None
            if isinstance(error, LookupError | TypeError):
                raise ValueError("the peer is not an executor") from None
            raise

    def _resume(self, attachment: Attachment, received: int) -> None:
        self._delivery.forget(received)
        self._known = True
        self._attachment = attachment
        if self._cut_at is not None:
            self._interrupted += time.monotonic() - self._cut_at
            self._cut_at = None
        self._unanswered = 0
        for frame in self._delivery.retained:
            attachment.write(frame)


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
