"""Groups on their way to a trainer, in an SQLite database that survives `kill -9` at any instant.

`outbox.db` holds one row for every group and every item that was given up (`Entry`), and the content of the groups that
are still on their way. Memory holds the rows of the latter only.

All methods belong to the event loop. The database (`lachesis_train.database`) belongs to one thread, which does one
call after the other; a call is completed even if its caller is cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import orjson

from backends.errors import LachesisError
from backends.tasks import finish
from lachesis.runs.run_folder import OtherSettings, changes
from lachesis_train.database import Database, delete_content, put_content, put_fact
from lachesis_train.group_encoding import compress, encode_group
from lachesis_train.outbox_state import (
    ACCEPTED,
    DELIVERED,
    ON_THEIR_WAY,
    POSTING,
    REFUSED,
    WAITING,
    Entry,
    KnownApi,
    OutboxState,
)
from lachesis_train.rollout_api import EnvDescription

T = TypeVar("T")

FORMAT = 1
"""`user_version` of the database."""

_COLUMNS = ", ".join(f"{field.name} {'INTEGER' if 'int' in str(field.type) else 'TEXT'}" for field in fields(Entry))
_row = attrgetter(*Entry.__slots__)
_NAMES = ", ".join(field.name for field in fields(Entry))
_PUT = f"INSERT OR REPLACE INTO groups ({_NAMES}) VALUES ({', '.join('?' for _ in fields(Entry))})"
_KNOWN = frozenset(field.name for field in fields(KnownApi))

_ANOTHER = "choose another folder (env.spool_path)"


class OutboxError(LachesisError):
    """The outbox cannot be used; the message names the file, the reason and the next step."""


class Outbox:
    """The outbox of one run.

    Args:
        folder: made when missing.
        settings: those that decide the content of groups; a second start must have the same.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "outbox.db"
        self.state = OutboxState()
        self._settings = orjson.loads(orjson.dumps(dict(settings), default=str))
        self._next_seq = 0
        self._database = Database(
            self.path,
            error=OutboxError,
            another=_ANOTHER,
            form=FORMAT,
            tables=[f"CREATE TABLE groups ({_COLUMNS}, PRIMARY KEY (seq))"],
            facts={"settings": self._settings},
        )

    async def open(self) -> None:
        """Lock the database and read its groups.

        Raises:
            OtherSettings: its groups were made with other settings.
            OutboxError: it is in use by another run, is damaged or not writable.
        """
        await self.run(self._open)

    async def close(self) -> None:
        await self.run(self._database.close)
        self._database.end_thread()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a function in the outbox's thread, after the calls that are already there."""
        return await finish(self._database.run(function, *args))

    async def append(
        self, payload: Mapping[str, Any], *, key: str, tokens: int, undelivered: int = 0, step: int = 0
    ) -> Entry:
        """Write a group down. Once this returns, the group will be delivered, whatever happens to this process.

        Args:
            payload: in Atropos' shape, without `env_id`.
            tokens: trained tokens in it.
            undelivered: sampled tokens of its rollouts that are not in it.
            step: the trainer's step when the group was begun; sent as `group_overrides.begin_step`.

        Raises:
            GroupError: no trainer could use it; nothing was written.
            OutboxError: the disk does not take it.
        """
        sequences = len(payload.get("tokens") or ())
        entry = Entry(self._new_seq(), os.urandom(16).hex(), key, sequences, tokens, undelivered, step)
        await finish(self._save(entry, payload=payload))
        return entry

    async def body(self, entry: Entry, env_id: int) -> bytes:
        """The gzipped request that posts a group as environment `env_id`."""
        return await self._read(entry, b'{"env_id":%d,' % env_id, compress)

    async def payload(self, entry: Entry) -> bytes:
        """The group as it was appended, as JSON."""
        return await self._read(entry, b"{", b"".join)

    # What became of groups. Each is on the disk when the call returns, except `seen`.

    async def registered(self, known: KnownApi, *, again: bool) -> None:
        """The API has registered the environment. `again`: the groups that it had accepted have to be posted again."""
        lost = self.state.lost_by_restart() if again else []
        waiting = [replace(entry, state=WAITING, env_id=None, requeued=entry.requeued + 1) for entry in lost]
        changed = {entry.seq: entry for entry in (*self.state.begun_after(known.step), *waiting)}
        # A trainer that went back to an earlier step ages them from there.
        younger = [replace(entry, step=min(entry.step, known.step)) for entry in changed.values()]
        await finish(self._save(*younger, known=known))

    async def disconnected(self) -> None:
        """The API knows that the environment has left."""
        if self.state.known is not None:
            await finish(self._save(known=replace(self.state.known, connected=False)))

    async def posting(self, entry: Entry, *, env_id: int) -> None:
        """The group is about to be posted: from now on it is in doubt."""
        await finish(self._save(replace(entry, state=POSTING, env_id=env_id)))

    async def accepted(self, *, buffer: int = 0) -> None:
        """The group in doubt is in the API's memory."""
        entry, known = self.state.in_doubt, self.state.known
        if entry is None:
            return
        if known is not None and known.env_id == entry.env_id:
            largest = max(known.largest, entry.sequences)
            known = replace(known, last_group_id=entry.group_id, buffer=buffer, largest=largest)
        await finish(self._save(replace(entry, state=ACCEPTED), known=known))

    async def back(self, *, unsure: bool = False) -> None:
        """The group in doubt did not arrive, or nobody can tell (`unsure`): it is the next to be posted."""
        if (entry := self.state.in_doubt) is not None:
            await finish(self._save(replace(entry, state=WAITING, env_id=None, requeued=entry.requeued + unsure)))

    async def refused(self, reason: str, entry: Entry | None = None) -> None:
        """The API will never take the group in doubt, or this one that waits is not posted."""
        if (entry := entry or self.state.in_doubt) is not None:
            await finish(self._save(replace(entry, state=REFUSED, reason=reason)))

    async def left_out(self, key: str, reason: str, tokens: int) -> None:
        """An item without a group to send: its `tokens` sampled tokens are not delivered."""
        entry = Entry(self._new_seq(), "", key, 0, 0, tokens, state=REFUSED, reason=reason)
        await finish(self._save(entry))

    async def seen(self, env_id: int, *, step: int, sequences: int, waiting: Collection[str] | None = None) -> None:
        """The API is at `step` and holds at most `sequences` sequences that were posted as `env_id`.

        The stock API's queue is first in, first out: the older groups are in batches. Otherwise `waiting` has the ids
        of the groups in the queue.
        """
        known, queue = self.state.known, self.state.accepted.get(env_id, [])
        held = sum(entry.sequences for entry in queue)
        delivered = []
        for entry in queue:
            if held <= sequences if waiting is None else entry.group_id in waiting:
                continue
            held -= entry.sequences
            delivered.append(replace(entry, state=DELIVERED, batch_step=step))
        if known is not None and step > known.step:
            known = replace(known, step=step)
        if delivered or known is not self.state.known:
            await finish(self._save(*delivered, known=known, flush=False))  # a later look repeats it

    # The database. Disk first, then memory.

    async def _save(
        self,
        *entries: Entry,
        known: KnownApi | None = None,
        payload: Mapping[str, Any] | None = None,
        flush: bool = True,
    ) -> None:
        await self._database.run(self._write, entries, known, payload, flush)
        for entry in entries:
            self.state.put(entry)
        self.state.known = known or self.state.known

    def _new_seq(self) -> int:
        self._next_seq += 1
        return self._next_seq - 1

    async def _read(self, entry: Entry, start: bytes, join: Callable[[Iterator[bytes]], bytes]) -> bytes:
        """A group's content after `start`. `join` has a thread to itself: it may compress for a while."""

        def chunks() -> Iterator[bytes]:
            yield start
            for at in itertools.count():
                chunk = self._database.from_thread(self._database.chunk, entry.seq, at)
                if chunk is None:
                    return
                yield chunk

        return await finish(asyncio.to_thread(join, chunks()))

    def _write(
        self, entries: tuple[Entry, ...], known: KnownApi | None, payload: Mapping[str, Any] | None, flush: bool
    ) -> None:
        pieces: list[bytes] = []
        if payload is not None:
            of_entry = {"group_id": entries[0].group_id, "begin_step": entries[0].step}
            overrides = {**(payload.get("group_overrides") or {}), **of_entry}
            pieces = encode_group({**payload, "group_overrides": overrides})
        with self._database.transaction(flush=flush) as database:
            for entry in entries:
                database.execute(_PUT, _row(entry))
                if entry.state not in ON_THEIR_WAY:
                    delete_content(database, entry.seq)
            if payload is not None:
                put_content(database, entries[0].seq, pieces[1:])  # `_read` begins with the brace
            if known is not None and known is not self.state.known:
                put_fact(database, "api", known)

    def _open(self) -> None:
        if (self.folder / "marks.jsonl").exists():
            raise OutboxError(
                f"{self.folder} holds the groups of an earlier version of Lachesis, which this one cannot read; deliver"
                f" them with that version, or {_ANOTHER}"
            )
        try:
            self._database.open()
            self._load()
        except BaseException:
            self._database.close()
            raise

    def _load(self) -> None:
        facts = self._database.facts()
        if changed := changes(facts["settings"], self._settings):
            raise OtherSettings(
                f"the groups in {self.path} were made with other settings ({changed}); start with the same settings to "
                f"deliver the rest of them, or {_ANOTHER}"
            )
        if (api := facts.get("api")) is not None:
            known = {name: value for name, value in api.items() if name in _KNOWN}  # earlier versions wrote more
            self.state.known = KnownApi(**{**known, "env": EnvDescription(**api["env"])})
        with self._database.errors() as database:
            for row in database.execute(f"SELECT {_NAMES} FROM groups ORDER BY seq"):
                self.state.put(entry := Entry(*row))
                self._next_seq = entry.seq + 1
