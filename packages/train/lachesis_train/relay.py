"""Posts the groups in the outbox to the rollout API, one at a time, until it is stopped.

With our own API (`lachesis api`), which keeps groups on disk and takes each group id once, a group is posted until the
API has it. Whichever process dies meanwhile, it is in one batch.

With the stock API, which keeps its queue in memory and knows no idempotency keys:

* The death of this process loses no group: the next start posts the groups in the outbox.
* It doubles none either. At most one group is in doubt (posted, not yet acknowledged), and the answers of the API show
  whether it arrived (`lachesis_train.reconcile`). Where they do not, the group is posted again, counted as
  `maybe_doubled`, and recognisable by `group_overrides.group_id`.
* When the API dies, the groups of its queue are posted again, except those that were seen to leave it. To keep that
  exact, at most `window` batches wait at the API: with one, a batch that is formed is handed out at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from backends.errors import LachesisError
from lachesis.runs.registration import Registration, TrainerInfo
from lachesis.wording import counted
from lachesis_tokens.samples.group_shapes import NO_SPLIT_GROUPS
from lachesis_train.outbox import Outbox
from lachesis_train.outbox_state import Entry, KnownApi
from lachesis_train.reconcile import PostResult, most_held, result_of_post, taken_unseen, was_restarted
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
    "Atropos' rollout API: no finished group is lost, and one may be doubled where its answers leave open whether it "
    "arrived; a batch that the trainer loses is lost (docs/serving.md)"
)

_FIRST_DELAY = 0.5


class RelayError(LachesisError):
    """Groups cannot be posted with these settings; says what to change. Nothing in the outbox is lost."""


@dataclass(frozen=True, slots=True)
class RelayPace:
    """How often the relay asks the API. Seconds."""

    poll: float = 0.5
    """Between two looks at the queue while there is nothing to post. Below the 5 s after which the API hangs up."""
    settle: float = 1.0
    """Before the result of an unanswered POST is looked up: the API may still be reading it."""
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
        self._others_reported = False

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
                    hint = "" if error.status in UNAUTHORISED else "; set rollout_server_url to that of a rollout API"
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
            return await self._register(restarted=False)
        if known.instance and status.registrations != known.registrations:
            return await self._register(restarted=False)  # a trainer that began anew
        if self.api.connection != self._verified:
            if not await self._is_same_process(known):
                return await self._register(restarted=True)
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
        if status.env_weight < 1.0 and not self._others_reported and not known.instance:
            self._others_reported = True
            self.report(
                f"another environment is registered at {self.api.url}: after a kill or a lost answer it may be unknown "
                "whether a group arrived, and the group is then posted again; let the trainer drop a group whose "
                "group_overrides.group_id it has had (docs/serving.md)"
            )
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
        self._verified = None
        info = await self.api.info()
        if info is None:
            return self._no_trainer("no trainer has registered")
        self.info = info
        if self.env.group_size > info.batch_size:
            raise RelayError(
                f"group_size {self.env.group_size} is larger than the trainer's batch_size {info.batch_size}: no "
                "batch could ever hold a group; set one of them"
            )
        registration = await self.api.register(self.env)
        if registration is None:
            return self._no_trainer("the trainer has not asked for its first batch")
        self.registration = registration
        connection, state = self.api.connection, self.outbox.state
        identity = await self._identify()
        before, taken = state.known, 0
        if before is not None:
            restarted = restarted or registration.env_id <= before.env_id or not await self._is_same_process(before)
            if restarted:
                taken = taken_unseen(state.lost_by_restart(), before, registration.starting_step)
            elif before.connected and before.env_id != registration.env_id:
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
        await self.outbox.registered(known, restarted=restarted, taken=taken)
        if restarted and before is not None:
            self.report(f"{self.api.url} was restarted; {counted(len(state.waiting), 'group')} to be posted")
        elif info.batch_size % self.env.group_size and identity.stock:
            self.report(
                f"the trainer's batch_size {info.batch_size} is no multiple of group_size {self.env.group_size}: "
                "the stock API forms no batch from such groups alone"
            )
        self._verified = connection
        return True

    def _no_trainer(self, reason: str) -> bool:
        self._set_trouble(f"{self.api.url}: {reason}; waiting for it")
        return False

    async def _is_same_process(self, known: KnownApi) -> bool:
        """Whether the API is still the process that `known` describes. If so, no group is left in doubt."""
        state, identity = self.outbox.state, await self._identify()
        if identity.instance or known.instance:
            if identity.instance == known.instance:
                await self.outbox.back()  # the API knows whether it has it
            return identity.instance == known.instance
        if state.in_doubt is not None:
            await asyncio.sleep(self.pace.settle)
        try:
            status = await self.api.status_env(known.env_id)
        except UnknownEnv:
            return False
        connection = self.api.connection
        latest = await self.api.latest()
        if self.api.connection != connection:
            raise ConnectionReplaced(self.api.url, "the API hung up between two requests")
        held, in_doubt = state.in_api[known.env_id], state.in_doubt
        if was_restarted(known, status, latest, held=held, in_doubt=in_doubt):
            return False
        if in_doubt is not None:
            match result_of_post(in_doubt, known, status, latest, held=held):
                case PostResult.ARRIVED:
                    await self.outbox.accepted()
                case PostResult.ABSENT:
                    await self.outbox.back()
                case PostResult.UNKNOWN:
                    self.report(
                        f"group {in_doubt.group_id} was posted and not acknowledged, and other environments have "
                        "posted since; it is posted again, and may arrive twice"
                    )
                    await self.outbox.back(unsure=True)
        return True

    async def _seen(self, known: KnownApi, status: EnvStatus, env_id: int) -> None:
        await self.outbox.seen(
            env_id, step=status.current_step, sequences=most_held(known, status), waiting=status.waiting
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
        await self.outbox.posting(entry, env_id=known.env_id, alone=status.env_weight >= 1.0)
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
