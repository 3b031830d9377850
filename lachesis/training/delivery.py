"""Posts spooled groups to the rollout API, one at a time, for as long as it takes.

What is guaranteed with the stock API, which keeps its queue in memory and knows no idempotency keys:

* No group is lost by the death of this process, at any instant: what the spool holds is posted by the next start.
* No group is doubled by it either. At most one group is in doubt (posted, not yet marked), and the API itself tells
  whether it arrived: by the group that it received last, else by the length of its queue. Only where other environments
  have posted meanwhile *and* a batch was formed in between, nobody can tell; then the group is posted again, counted as
  `maybe_doubled`, and recognisable by `group_overrides.group_id`.
* When the API dies, its queue is posted again, without the groups that were seen to leave it. To keep that exact, no
  more than `window` batches lie at the API at any time, and the rest waits in the spool: with one at most, a batch
  that is formed is a batch that is handed out. A batch that was taken after the last look is known if the trainer
  registers again with its own step as `starting_step` and there are no other environments; else it is posted again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from lachesis.training.rollout_api import (
    ApiDown,
    ApiRefused,
    ConnectionReplaced,
    EnvDescription,
    EnvStatus,
    Latest,
    RolloutApi,
    RolloutApiError,
    TrainerInfo,
    UnknownEnv,
)
from lachesis.training.spool import Spool
from lachesis.training.spool_state import Doubt, Entry, Known

MAX_FAILURES = 5
"""Times that the API may fail (5xx) over one group, while it answers everything else."""

_FIRST_DELAY = 0.5


class DeliveryError(Exception):
    """Groups cannot be delivered with these settings; says what to change. Nothing that is spooled is lost."""


class Fate(Enum):
    """What became of a group whose POST got no answer."""

    ARRIVED = "arrived"
    """It is in the API's memory, or was."""
    ABSENT = "absent"
    """The API never took it."""
    UNKNOWN = "unknown"
    """Both are possible."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the API is asked. Seconds."""

    poll: float = 0.5
    """Between two looks at the queue while nothing is to be posted. Below the 5 s after which the API hangs up."""
    settle: float = 1.0
    """Before an unanswered POST is judged: the API may still be reading it."""
    longest_delay: float = 15.0
    """Between two attempts while the API is down."""


class Delivery:
    """The one who talks to the API. `run` it as a task.

    Args:
        refuse: awaited with a group that the API refuses for good, and why; writes it down.
        tell: prints one line when the API goes away, comes back, or has no trainer.
        changed: called when `info`, `status` or `trouble` may have changed.
        window: batches that may lie at the API.
    """

    def __init__(
        self,
        api: RolloutApi,
        spool: Spool,
        env: EnvDescription,
        *,
        refuse: Callable[[Entry, str], Awaitable[None]],
        tell: Callable[[str], None],
        changed: Callable[[], None] = lambda: None,
        window: int = 1,
        pace: Pace | None = None,
    ) -> None:
        self.api = api
        self.spool = spool
        self.env = env
        self.refuse = refuse
        self.tell = tell
        self.window = window
        self.pace = pace or Pace()
        self.info: TrainerInfo | None = None
        """None until a trainer is there."""
        self.status: EnvStatus | None = None
        """The last look; None until the environment is registered."""
        self.trouble = ""
        """What it waits for, other than groups."""
        self._changed = changed
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._verified: int | None = None
        self._body: tuple[int, int, bytes] | None = None
        self._failures = 0

    def wake(self) -> None:
        """There is something to post."""
        self._wake.set()

    async def run(self) -> None:
        """Register and post until `stop`.

        Raises:
            DeliveryError: the settings do not fit the trainer, or the address is not that of a rollout API.
        """
        delay, replaced = _FIRST_DELAY, 0
        while True:
            self._wake.clear()
            try:
                connected = await self._connect()
                if connected and not replaced:
                    self._fine()
                worked = connected and await self._post_next()
                delay, replaced = _FIRST_DELAY, 0
            except ConnectionReplaced as error:
                worked = True
                replaced += 1
                if replaced == MAX_FAILURES:
                    self._trouble(f"{error}; something between here and the API does not keep connections alive")
                if replaced >= MAX_FAILURES:
                    if self._stopping.is_set():
                        return
                    await _wait(self._stopping, self.pace.poll)
            except RolloutApiError as error:
                if isinstance(error, ApiRefused) and self.status is None:
                    raise DeliveryError(
                        f"{error}; set rollout_server_url to the address of Atropos' run-api"
                    ) from error
                self._trouble(f"{error}; finished groups wait in {self.spool.folder}, and it is asked until it answers")
                if self._stopping.is_set():
                    return
                await _wait(self._stopping, delay * random.uniform(0.7, 1.0))
                delay = min(self.pace.longest_delay, 2 * delay)
                continue
            self._changed()
            if not worked:
                if self._stopping.is_set():
                    return
                await _wait(self._wake, self.pace.poll)

    def stop(self) -> None:
        """Let `run` end: when nothing more fits at the API, or it does not answer."""
        self._stopping.set()
        self._wake.set()

    async def leave(self) -> None:
        """Tell the API that nothing more will come, if it is still the one that knows us."""
        known = self.spool.state.known
        if known is None or not known.connected or self._verified is None:
            return
        with suppress(RolloutApiError):
            await self.api.disconnect(known.env_id, connection=self._verified)
            await self.spool.disconnected()

    # Registration.

    async def _connect(self) -> bool:
        """Whether this very connection leads to a process that knows us; `status` is then fresh."""
        known = self.spool.state.known
        if known is None or not known.connected or known.env != self.env:
            return await self._register(restarted=False)
        try:
            status = await self.api.status_env(known.env_id)
        except UnknownEnv:
            return await self._register(restarted=False)
        if self.api.connection != self._verified:
            if not await self._is_same(known):
                return await self._register(restarted=True)
            connection = self.api.connection
            info = await self.api.info()
            if info is None:  # reset a moment ago; what finishes meanwhile is built for the trainer that was there
                return self._no_trainer("no trainer has registered")
            self.info = info
            status = await self.api.status_env(known.env_id)
            if self.api.connection != connection:
                raise ConnectionReplaced(self.api.url, "the API hung up between two questions")
            self._verified = connection
        self.status = status
        await self._see(known, status)
        for env_id in [env_id for env_id in self.spool.state.accepted if env_id != known.env_id]:
            await self._see(known, await self.api.status_env(env_id), env_id)
        return True

    async def _register(self, *, restarted: bool) -> bool:
        self._verified = None
        info = await self.api.info()
        if info is None:
            return self._no_trainer("no trainer has registered")
        self.info = info
        if self.env.group_size > info.batch_size:
            raise DeliveryError(
                f"group_size {self.env.group_size} is larger than the trainer's batch_size {info.batch_size}: no "
                "batch could ever hold a group; set one of them"
            )
        registration = await self.api.register(self.env)
        if registration is None:
            return self._no_trainer("the trainer has not asked for its first batch")
        connection, state = self.api.connection, self.spool.state
        before, taken = state.known, 0
        if before is not None:
            restarted = restarted or registration.env_id <= before.env_id or not await self._is_same(before)
            if restarted:
                taken = taken_unseen(state.lost_by_restart(), before, registration.starting_step)
            elif before.connected and before.env_id != registration.env_id:
                await self.api.disconnect(before.env_id, connection=self.api.connection)
        try:
            self.status = await self.api.status_env(registration.env_id)
        except UnknownEnv as error:
            if self.env.weight <= 0:
                raise DeliveryError(
                    f"{error}, which was registered just now: the stock API divides by the sum of all weights; set "
                    "inference_weight above 0"
                ) from error
            raise ApiDown(self.api.url, error.reason) from error
        if self.api.connection != connection:
            raise ConnectionReplaced(self.api.url, "the API was replaced during the registration")
        await self.spool.registered(
            registration.env_id,
            self.env,
            batch_size=info.batch_size,
            step=registration.starting_step,
            num_steps=registration.num_steps,
            restarted=restarted,
            taken=taken,
        )
        if restarted and before is not None:
            self.tell(f"{self.api.url} was restarted; {len(state.waiting)} groups wait to be posted")
        elif info.batch_size % self.env.group_size:
            self.tell(
                f"the trainer's batch_size {info.batch_size} is no multiple of group_size {self.env.group_size}: "
                "the stock API forms no batch from such groups alone"
            )
        self._verified = connection
        return True

    def _no_trainer(self, reason: str) -> bool:
        self._trouble(f"{self.api.url}: {reason}; waiting for it")
        return False

    async def _is_same(self, known: Known) -> bool:
        """Whether the API is still the process that `known` is about; then no group is left in doubt."""
        state = self.spool.state
        if state.doubt is not None:
            await asyncio.sleep(self.pace.settle)
        try:
            status = await self.api.status_env(known.env_id)
        except UnknownEnv:
            return False
        connection = self.api.connection
        latest = await self.api.latest()
        if self.api.connection != connection:
            raise ConnectionReplaced(self.api.url, "the API hung up between two questions")
        held = state.in_api[known.env_id]
        if was_restarted(known, status, latest, held=held, doubt=state.doubt):
            return False
        if state.doubt is not None:
            match judge(state.doubt, known, status, latest, held=held):
                case Fate.ARRIVED:
                    await self.spool.accepted()
                case Fate.ABSENT:
                    await self.spool.back()
                case Fate.UNKNOWN:
                    self.tell(
                        f"group {state.doubt.entry.group_id} was posted and not acknowledged, and cannot be told from "
                        "those of other environments; it is posted again"
                    )
                    await self.spool.back(unsure=True)
        return True

    async def _see(self, known: Known, status: EnvStatus, env_id: int | None = None) -> None:
        await self.spool.seen(
            known.env_id if env_id is None else env_id,
            step=status.current_step,
            sequences=most_held(known, status),
        )

    # Posting.

    async def _post_next(self) -> bool:
        state, known, info, status = self.spool.state, self.spool.state.known, self.info, self.status
        if not state.waiting or known is None or info is None or status is None or self._verified is None:
            return False
        entry = state.waiting[0]
        lying = status.self_queue_size * known.env.group_size
        if lying and lying + entry.sequences > self.window * info.batch_size:
            return False
        if self._body is None or self._body[:2] != (entry.seq, known.env_id):
            # Kept over a failure: while it is made, the API may hang up.
            self._body = (entry.seq, known.env_id, await self.spool.body(entry, known.env_id))
        await self.spool.posting(entry, env_id=known.env_id, step=known.step, alone=status.env_weight >= 1.0)
        try:
            buffer = await self.api.send(self._body[2], connection=self._verified)
        except ConnectionReplaced:
            await self.spool.back()
            raise
        except ApiRefused as error:
            await self._give_up(entry, f"the rollout API answered {error.status}: {error.body}")
        except ApiDown as error:
            self._verified = None
            if error.status is None:
                raise
            self._failures += 1
            if self._failures < MAX_FAILURES:
                raise
            await self._give_up(entry, f"the rollout API failed over it {self._failures} times: {error.reason}")
        else:
            await self.spool.accepted(buffer=buffer)
        self._body, self._failures = None, 0
        return True

    async def _give_up(self, entry: Entry, reason: str) -> None:
        await self.refuse(entry, reason)
        await self.spool.refused("refused by the rollout API")

    # Saying so.

    def _trouble(self, reason: str) -> None:
        if not self.trouble:
            self.tell(reason)
        self.trouble = reason
        self._changed()

    def _fine(self) -> None:
        if self.trouble:
            self.tell(f"{self.api.url} takes groups")
        self.trouble = ""


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def most_held(known: Known, status: EnvStatus) -> int:
    """At most so many of our sequences are at the API, which tells groups, rounded down."""
    return status.self_queue_size * known.largest + known.largest - 1 + known.buffer


def was_restarted(known: Known, status: EnvStatus, latest: Latest, *, held: int, doubt: Doubt | None) -> bool:
    """Whether an answer can only come from a process other than the one that `known` is about.

    Args:
        held: sequences that the known process held when last seen.
        doubt: the group that may have arrived since.
    """
    if status.current_step < known.step:
        return True
    if status.current_step == known.step and most_held(known, status) < held:
        return True  # without a batch, nothing leaves the queue
    most = held + (doubt.entry.sequences if doubt is not None else 0)
    if status.self_queue_size * known.env.group_size > most:
        return True  # of more than we ever posted: somebody else has our number
    if not _even(known, doubt):
        return False  # the API's last group is not always told
    if latest.empty:
        return known.last_group_id is not None
    ours = {known.last_group_id, doubt.entry.group_id if doubt is not None else None}
    return latest.env_id == known.env_id and latest.group_id not in ours


def judge(doubt: Doubt, known: Known, status: EnvStatus, latest: Latest, *, held: int) -> Fate:
    """Whether the group in doubt arrived at the process that `known` is about; arguments as above."""
    if latest.group_id == doubt.entry.group_id:
        return Fate.ARRIVED
    if not _even(known, doubt):
        return Fate.UNKNOWN
    if latest.empty or latest.env_id == known.env_id:
        return Fate.ABSENT
    if status.current_step == doubt.step:  # nothing has left the queue since
        lying = status.self_queue_size * known.env.group_size
        if lying == held:
            return Fate.ABSENT
        if lying == held + doubt.entry.sequences:
            return Fate.ARRIVED
    return Fate.UNKNOWN


def taken_unseen(lost: Sequence[Entry], known: Known, starting_step: int) -> int:
    """How many of the groups that a dead API held, oldest first, its trainer had got after the last look at it.

    A trainer that registers again with its own step says so by the difference; one that begins at 0 says nothing. A
    difference that would take more than there was counts something else.
    """
    taken = (starting_step - known.step) * known.batch_size
    if not known.alone or taken <= 0 or taken > sum(entry.sequences for entry in lost):
        return 0
    count = 0
    while taken > 0:
        taken -= lost[count].sequences
        count += 1
    return count


def _even(known: Known, doubt: Doubt | None) -> bool:
    """All groups have the registered size, so that the API neither holds any back nor changes its unit."""
    size = known.env.group_size
    return known.largest == size and not known.buffer and (doubt is None or doubt.entry.sequences == size)
