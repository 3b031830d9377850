"""The owner's end of the executor's protocol: numbered requests and their answers.

A connection over one stream is lost with that stream. A resumable connection dials again when its stream breaks: no
request is executed twice and no answer is lost. A lost connection stays lost, and every request, pending or new, raises
`SandboxLost` with the same reason. `executor/PROTOCOL.md` has the protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from backends.tasks import has_failed

from . import answers
from .byte_stream import Attachment, Unreachable
from .byte_stream import ByteStream as ByteStream
from .byte_stream import asyncio_stream as asyncio_stream
from .errors import INSIDE, BackendError, SandboxExhausted, SandboxLost
from .executor.framing import CHUNK, Delivery, encode

if TYPE_CHECKING:
    from .attaching import Attaching, Dial

T = TypeVar("T")

PATIENCE = 60.0
"""Seconds, beyond the time that a request may take, after which a silent executor counts as lost."""
GRACE = 60.0
"""Seconds within which a broken connection can be restored."""

_PING, _IDLE = 5.0, 3  # seconds between pings while requests are pending; that many times longer otherwise
_STARVED = 5  # of ten periods in which the limit of processor time holds a silent executor back: it is starved
_UNANSWERED = 3  # pings in a row without an answer before the stream is aborted
_DAMAGED = 0.05  # seconds after a damaged stream before it is replaced: a peer may damage every one


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
        self._attaching: Attaching | None = None
        self._name, self._grace, self._sealed = "the sandbox", GRACE, False
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
        from .attaching import Attaching  # late: connections of this machine's sandboxes need none

        self = cls.__new__(cls)
        self._set_up()
        self._name, self._grace, self._sealed = name, grace, sealed
        self._attaching = Attaching(dial, self._delivery, sealed=sealed)
        self._attachment = None
        try:
            attachment = await self._attach(start_timeout)
        except Unreachable as error:
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
        if self._attaching is not None:
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

    @property
    def requests(self) -> int:
        """How many there have been."""
        return self._last

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
        if self._attaching is not None:
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
            if self._attaching is None:
                return self._goodbye if cut is None else cut
            if cut is not None:
                await asyncio.sleep(_DAMAGED)
            if self._goodbye is not None or self._leaving:
                return self._goodbye or "it was shut down"
            try:
                attachment = await self._attach(self._grace)
            except Unreachable as error:
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
                if self._attaching is not None and self._delivery.is_due():
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
        if "ack" in header and self._attaching is not None:
            self._delivery.forget(header["ack"])

    def _drop_stream(self) -> None:
        if self._attachment is not None:
            with contextlib.suppress(Exception):
                self._attachment.stream.abort()
            self._attachment = None
            self._cut_at = time.monotonic()

    async def _attach(self, seconds: float) -> Attachment:
        """A new stream, on which the frames are sent again that the executor has not received. See `Attaching`."""
        assert self._attaching is not None
        attachment, hello = await self._attaching.attach(seconds)
        if not self.hello.done():
            self.hello.set_result(hello)
        self._attachment = attachment
        if self._cut_at is not None:
            self._interrupted += time.monotonic() - self._cut_at
            self._cut_at = None
        self._unanswered = 0
        for frame in self._delivery.retained:
            attachment.write(frame)
        return attachment
