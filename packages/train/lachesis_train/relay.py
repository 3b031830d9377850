"""Posts the groups in the outbox to the rollout API, one at a time, until it is stopped.

With our own API (`lachesis api`), which keeps groups on disk and takes each group id once, a group is posted until the
API has it. Whichever process dies meanwhile, it is in one batch.

With the stock API, which keeps its queue in memory and knows no idempotency keys, a group is posted at least once:

* A group whose answer is missing is posted again, unless the API names it as the group that it received last.
* The stock API has no name for its process. It is the one that holds our groups if the group that it received last is
  ours. Otherwise the groups that were not seen to leave its queue are posted again. At most `window` batches wait
  there, so no more than these can be doubled.

A trainer recognises a second copy by `group_overrides.group_id`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from backends.errors import LachesisError
from backends.text import counted
from lachesis.runs.registration import Registration, TrainerInfo
from lachesis_tokens.samples.group_shapes import NO_SPLIT_GROUPS
from lachesis_train.outbox import Outbox
from lachesis_train.outbox_state import Entry, KnownApi
from lachesis_train.rollout_api import (
    UNAUTHORISED,
    ApiDown,
    ApiIdentity,
    ApiRefused,
    ConnectionReplaced,
    EnvDescription,
    EnvStatus,
    RolloutApi,
    RolloutApiError,
    UnknownEnv,
)

MAX_FAILURES = 5
"""Times that the API may fail (5xx) over one group, while it answers everything else."""

EXACTLY_ONCE = "Lachesis rollout API: each finished group is in exactly one batch, whichever process is killed"
AT_LEAST_ONCE = (
    "Atropos' rollout API: each finished group is sent at least once, and again after a kill or a lost answer; let the "
    "trainer drop a group whose group_overrides.group_id it has had, or use `lachesis api` (docs/serving.md)"
)

_FIRST_DELAY = 0.5


class RelayError(LachesisError):
    """Groups cannot be posted with these settings; says what to change. Nothing in the outbox is lost."""


@dataclass(frozen=True, slots=True)
class RelayPace:
    """How often the relay asks the API. Seconds."""

    poll: float = 0.5
    """Between two looks at the queue while there is nothing to post. Below the 5 s after which the API hangs up."""
    longest_delay: float = 15.0
    """Between two attempts while the API is down."""


class OutboxRelay:
    """Moves groups from an outbox to the API. `run` it as a task.

    Args:
        on_refused: awaited with a group that the API refuses for good, and the reason; writes it down.
        report: prints one line when the API goes away, comes back, or has no trainer.
        on_change: called when `info`, `status` or `trouble` may have changed.
        drop: asked about the next group, with the sequences that wait at the API; if it is not to be posted any more,
            `drop` writes that down and returns True.
        window: batches that may wait at the API.
        split: groups may have more sequences than `group_size`, which only some APIs take.
    """

    def __init__(
        self,
        api: RolloutApi,
        outbox: Outbox,
        env: EnvDescription,
        *,
        on_refused: Callable[[Entry, str], Awaitable[None]],
        report: Callable[[str], None],
        on_change: Callable[[], None] = lambda: None,
        drop: Callable[[Entry, int], Awaitable[bool]] | None = None,
        window: int = 1,
        pace: RelayPace | None = None,
        split: bool = False,
    ) -> None:
        self.api = api
        self.outbox = outbox
        self.env = env
        self.on_refused = on_refused
        self.report = report
        self.drop = drop
        self.window = window
        self.split = split
        self.pace = pace or RelayPace()
        self.info: TrainerInfo | None = None
        """None until a trainer has registered."""
        self.status: EnvStatus | None = None
        """The latest status; None until the environment is registered."""
        self.registration: Registration | None = None
        """The latest answer to the registration."""
        self.trouble = ""
        """Why nothing can be posted; empty while the API takes groups."""
        self.guarantees = ""
        """What holds with this API; empty until it has answered."""
        self._on_change = on_change
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._verified: int | None = None
        """The connection over which the API has confirmed the registration."""
        self._body: tuple[int, int, bytes] | None = None
        self._failures = 0

    def wake(self) -> None:
        """There is a group to post."""
        self._wake.set()

    async def run(self) -> None:
        """Register and post until `stop`.

        Raises:
            RelayError: the settings do not fit the trainer, or the address is not that of a rollout API.
            OutboxError: the outbox cannot be written.
        """
        delay, replaced = _FIRST_DELAY, 0
        while True:
            self._wake.clear()
            try:
                connected = await self._connect()
                if connected and not replaced:
                    self._clear_trouble()
                worked = connected and await self._post_next()
                delay, replaced = _FIRST_DELAY, 0
            except ConnectionReplaced as error:
                worked = True
                replaced += 1
                if replaced == MAX_FAILURES:
                    self._set_trouble(f"{error}; something between here and the API does not keep connections alive")
                if replaced >= MAX_FAILURES:
                    if self._stopping.is_set():
                        return
                    await _wait(self._stopping, self.pace.poll)
            except RolloutApiError as error:
                if isinstance(error, ApiRefused) and self.status is None:
                    hint = (
                        "" if error.status in UNAUTHORISED else "; set rollout_server_url to the URL of a rollout API"
                    )
                    raise RelayError(f"{error}{hint}") from error
                self._set_trouble(
                    f"{error}; finished groups wait in {self.outbox.folder}, and the API is tried until it answers"
                )
                if self._stopping.is_set():
                    return
                asked = error.retry_after if isinstance(error, ApiDown) else None
                await _wait(self._stopping, delay * random.uniform(0.7, 1.0) if asked is None else asked)
                delay = min(self.pace.longest_delay, 2 * delay)
                continue
            self._on_change()
            if not worked:
                if self._stopping.is_set():
                    return
                await _wait(self._wake, self.pace.poll)

    def stop(self) -> None:
        """Let `run` end as soon as nothing more fits at the API, or the API does not answer."""
        self._stopping.set()
        self._wake.set()

    async def leave(self) -> None:
        """Announce to the API that nothing more will come, if it is still the process that knows us."""
        known = self.outbox.state.known
        if known is None or not known.connected or self._verified is None:
            return
        with suppress(RolloutApiError):
            await self.api.disconnect(known.env_id, connection=self._verified)
            await self.outbox.disconnected()

    # Registration.

    async def _connect(self) -> bool:
        """Whether the current connection leads to a process that knows us; `status` is then fresh."""
        if self._verified is None:
            await self._identify()
        known = self.outbox.state.known
        if known is None or not known.connected or known.env != self.env:
            return await self._register(restarted=False)
        try:
            status = await self.api.status_env(known.env_id)
        except UnknownEnv:
            return await self._register(restarted=not known.instance)
        if status.current_step < known.step and not known.instance:
            return await self._register(restarted=True)  # steps never go back
        if known.instance and status.registrations != known.registrations:
            return await self._register(restarted=False)  # a trainer that began anew
        if self.api.connection != self._verified:
            if not await self._has_ours(known):
                return await self._register(restarted=False)
            connection = self.api.connection
            info = await self.api.info()
            if info is None:  # reset a moment ago; groups that finish now are built for the trainer before
                return self._no_trainer("no trainer has registered")
            self.info = info
            status = await self.api.status_env(known.env_id)
            if self.api.connection != connection:
                raise ConnectionReplaced(self.api.url, "the API hung up between two requests")
            self._verified = connection
        self.status = status
        await self._seen(known, status, known.env_id)
        for env_id in [env_id for env_id in self.outbox.state.accepted if env_id != known.env_id]:
            await self._seen(known, await self.api.status_env(env_id), env_id)
        return True

    async def _identify(self) -> ApiIdentity:
        identity = await self.api.identify()
        if self.split and identity.stock:
            raise RelayError(f"{self.api.url}: {NO_SPLIT_GROUPS}")
        guarantees = EXACTLY_ONCE if identity.instance else AT_LEAST_ONCE
        if guarantees != self.guarantees:
            self.guarantees = guarantees
            self.report(f"{self.api.url}: {guarantees}")
        return identity

    async def _register(self, *, restarted: bool) -> bool:
        """`restarted`: the API does not have the memory any more that our groups were in."""
        self._verified = None
        info = await self.api.info()
        if info is None:
            return self._no_trainer("no trainer has registered")
        self.info = info
        if self.env.group_size > info.batch_size:
            raise RelayError(
                f"group_size {self.env.group_size} is larger than the trainer's batch_size {info.batch_size}: no "
                "batch can contain a group; set one of them"
            )
        registration = await self.api.register(self.env)
        if registration is None:
            return self._no_trainer("the trainer has not asked for its first batch")
        self.registration = registration
        connection, state = self.api.connection, self.outbox.state
        identity = await self._identify()
        before, again = state.known, False
        if before is not None:
            restarted = restarted or registration.env_id <= before.env_id
            again = restarted or not await self._has_ours(before)
            restarted = restarted or (again and bool(identity.instance or before.instance))
            if before.connected and not restarted:
                await self.api.disconnect(before.env_id, connection=self.api.connection)
        try:
            self.status = await self.api.status_env(registration.env_id)
        except UnknownEnv as error:
            if self.env.weight <= 0:
                raise RelayError(
                    f"{error}, which was registered just now: the stock API divides by the sum of all weights; set "
                    "inference_weight above 0"
                ) from error
            raise ApiDown(self.api.url, error.reason) from error
        if self.api.connection != connection:
            raise ConnectionReplaced(self.api.url, "the API was replaced during the registration")
        known = KnownApi(
            registration.env_id,
            self.env,
            info.batch_size,
            registration.starting_step,
            registration.num_steps,
            instance=identity.instance,
            registrations=self.status.registrations,
            largest=self.env.group_size,
        )
        posted_again = len(state.lost_by_restart()) if again else 0
        await self.outbox.registered(known, again=again)
        if restarted and before is not None:
            self.report(f"{self.api.url} was restarted; {counted(len(state.waiting), 'group')} to be posted")
        elif posted_again:
            self.report(
                f"{self.api.url} does not say whether it still holds {counted(posted_again, 'group')}, so they are "
                "posted again, and may arrive twice"
            )
        elif info.batch_size % self.env.group_size and identity.stock:
            self.report(
                f"the trainer's batch_size {info.batch_size} is not a multiple of group_size {self.env.group_size}: "
                "the stock API forms no batch from such groups alone"
            )
        self._verified = connection
        return True

    def _no_trainer(self, reason: str) -> bool:
        self._set_trouble(f"{self.api.url}: {reason}; waiting for it")
        return False

    async def _has_ours(self, known: KnownApi) -> bool:
        """Whether the API is certain to hold the groups that it accepted. If so, no group is left in doubt."""
        state, identity = self.outbox.state, await self._identify()
        if identity.instance or known.instance:
            if identity.instance == known.instance:
                await self.outbox.back()  # the API knows whether it has it
            return identity.instance == known.instance
        connection = self.api.connection
        last, in_doubt = await self.api.last_group_id(), state.in_doubt
        if self.api.connection != connection:
            raise ConnectionReplaced(self.api.url, "the API hung up between two requests")
        if in_doubt is not None and last == in_doubt.group_id:
            await self.outbox.accepted()
            return True
        if last is not None and last == known.last_group_id:
            await self.outbox.back(unsure=True)
            return True
        return False

    async def _seen(self, known: KnownApi, status: EnvStatus, env_id: int) -> None:
        await self.outbox.seen(
            env_id,
            step=status.current_step,
            sequences=known.most_held(status.self_queue_size),
            waiting=status.waiting,
        )

    # Posting.

    async def _post_next(self) -> bool:
        state, info, status = self.outbox.state, self.info, self.status
        known, entry = state.known, state.first_waiting
        if entry is None or known is None or info is None or status is None or self._verified is None:
            return False
        queued = status.self_queue_size * known.env.group_size if status.sequences is None else status.sequences
        # Ours packs groups of any size, which a single batch may never complete.
        window = self.window + 1 if known.instance else self.window
        # Fewer than a batch has are no batch: another group has to join them, however large it is.
        if queued >= info.batch_size and queued + entry.sequences > window * info.batch_size:
            return False
        if self.drop is not None and await self.drop(entry, queued):
            return True
        if self._body is None or self._body[:2] != (entry.seq, known.env_id):
            # Kept over a failure: while a large body is made, the API may hang up.
            self._body = (entry.seq, known.env_id, await self.outbox.body(entry, known.env_id))
        await self.outbox.posting(entry, env_id=known.env_id)
        try:
            buffer = await self.api.send(self._body[2], connection=self._verified)
        except ConnectionReplaced:
            self._verified = None
            await self.outbox.back()
            raise
        except ApiRefused as error:
            if error.status in UNAUTHORISED:
                self._verified = None
                raise
            await self._give_up(entry, f"the rollout API answered {error.status}: {error.body}")
        except ApiDown as error:
            self._verified = None
            if error.status is None or known.instance:
                raise
            self._failures += 1
            if self._failures < MAX_FAILURES:
                raise
            await self._give_up(entry, f"the rollout API failed over it {self._failures} times: {error.reason}")
        else:
            await self.outbox.accepted(buffer=buffer)
        self._body, self._failures = None, 0
        return True

    async def _give_up(self, entry: Entry, reason: str) -> None:
        await self.on_refused(entry, reason)
        await self.outbox.refused("refused by the rollout API")

    # Reports.

    def _set_trouble(self, reason: str) -> None:
        if not self.trouble:
            self.report(reason)
        self.trouble = reason
        self._on_change()

    def _clear_trouble(self) -> None:
        if self.trouble:
            self.report(f"{self.api.url} takes groups")
        self.trouble = ""


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
