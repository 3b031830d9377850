"""The state of the rollout API, in an SQLite database: groups, batches, environments and the trainer.

    received -> waiting -> in a batch -> acknowledged

A group is acknowledged to its environment once it is on the disk, and its content is deleted once the trainer has
acknowledged its batch. Its id stays, so that a copy is known whenever it comes. Batches have increasing ids, are formed
once and never change.

Memory holds a row for each group that is not acknowledged, never a content. All methods belong to the event loop.
"""

from __future__ import annotations

import itertools
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import orjson

from backends.errors import LachesisError
from backends.tasks import finish
from lachesis_train.api.group_body import GroupBody
from lachesis_train.api.state import RECENT, ApiState, Group, PendingBatch, RegisteredEnv
from lachesis_train.database import Database, delete_content, put_content, put_fact
from lachesis_train.group_encoding import GroupError
from lachesis_train.rollout_api import TrainerRegistration

T = TypeVar("T")

FORMAT: Final = 1
_ANOTHER: Final = "choose another file (--db)"
_TABLES: Final = (
    "CREATE TABLE groups (id INTEGER PRIMARY KEY AUTOINCREMENT, group_id TEXT UNIQUE, env_id INTEGER,"
    " sequences INTEGER, tokens INTEGER, bytes INTEGER, begin_step INTEGER, scores TEXT, received REAL,"
    " batch_id INTEGER)",
    "CREATE INDEX groups_of_batch ON groups (batch_id)",
    "CREATE TABLE batches (id INTEGER PRIMARY KEY AUTOINCREMENT, formed REAL, holder TEXT, given INTEGER,"
    " acknowledged INTEGER)",
    "CREATE TABLE environments (id INTEGER PRIMARY KEY, value TEXT)",
)
_GROUP = "id, group_id, env_id, sequences, tokens, bytes AS size, begin_step, scores, received, batch_id"
_RUN = ("trainer", "started", "begun", "first_step", "registrations")


class StoreError(LachesisError):
    """The database cannot be used; the message names the file, the reason and the next step."""


class Store:
    """The database of one rollout API."""

    def __init__(self, path: Path) -> None:
        self.state = ApiState()
        self._database = Database(
            path,
            error=StoreError,
            another=_ANOTHER,
            form=FORMAT,
            tables=_TABLES,
            facts={"instance": uuid.uuid4().hex, "run": {}},
        )

    async def open(self) -> None:
        """Lock the file and read it.

        Raises:
            StoreError: it is in use by another process, damaged or not writable.
        """
        try:
            self.state = await self._run(self._load)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """The database, after the calls that are already there."""
        await self._run(self._database.close)
        self._database.end_thread()

    async def add(self, bodies: Sequence[GroupBody]) -> list[bool]:
        """Keep groups; all are on the disk when this returns. Says of each whether it is new."""
        added = await self._run(self._insert, bodies)
        for group in added:
            if group is not None:
                self.state.waiting[group.id] = group
                self.state.recent.appendleft(group)
                self.state.received += 1
                self.state.stored += group.size
        return [group is not None for group in added]

    async def set_trainer(self, trainer: TrainerRegistration, *, first_step: int) -> None:
        """A trainer has registered."""
        registrations = self.state.registrations + 1
        await self._put_run(trainer=trainer, first_step=first_step, begun=False, registrations=registrations)

    async def begin(self, *, first_step: int) -> None:
        """The trainer asks for its first batch since it has registered."""
        await self._put_run(started=True, begun=True, first_step=first_step)

    async def _put_run(self, **changed: Any) -> None:
        """Change what the database has under `run`, then the state."""
        run = {name: getattr(self.state, name) for name in _RUN} | changed
        trainer = run["trainer"] and asdict(run["trainer"])
        await self._write(lambda database: put_fact(database, "run", {**run, "trainer": trainer}))
        for name, value in changed.items():
            setattr(self.state, name, value)

    async def put_env(self, env: RegisteredEnv) -> None:
        """A new environment, whose id is the number of those before it, or a change of one."""
        value = orjson.dumps(asdict(env)).decode()
        await self._write(
            lambda database: database.execute("INSERT OR REPLACE INTO environments VALUES (?, ?)", (env.env_id, value))
        )
        self.state.environments[env.env_id : env.env_id + 1] = [env]

    async def form(self, groups: Sequence[Group]) -> PendingBatch:
        """A batch of these groups."""

        def insert(database: sqlite3.Connection) -> int:
            cursor = database.execute("INSERT INTO batches VALUES (NULL, ?, NULL, 0, 0)", (time.time(),))
            changed = [(cursor.lastrowid, group.id) for group in groups]
            database.executemany("UPDATE groups SET batch_id = ? WHERE id = ?", changed)
            assert cursor.lastrowid is not None
            return cursor.lastrowid

        number, state = await self._write(insert), self.state
        step = state.step
        state.ages.extend(max(0, step - group.begin_step) for group in groups if group.begin_step is not None)
        batch = PendingBatch(number, [replace(state.waiting.pop(group.id), batch_id=number) for group in groups])
        state.batches[number] = batch
        state.last_batch = number
        return batch

    async def hand_out(self, batch: PendingBatch, holder: str) -> None:
        """The batch is the holder's from now on."""
        if batch.holder != holder:
            await self._write(
                lambda database: database.execute("UPDATE batches SET holder = ? WHERE id = ?", (holder, batch.id))
            )
            batch.holder = holder

    async def mark_given(self, batch: PendingBatch, given: bool) -> None:
        """Whether the batch was sent completely. Survives the end of this process, and not one of the machine."""
        if batch.given is not given:
            await self._write(
                lambda database: database.execute("UPDATE batches SET given = ? WHERE id = ?", (given, batch.id)),
                flush=False,
            )
            batch.given = given

    async def acknowledge(self, batches: Sequence[PendingBatch]) -> None:
        """The trainer needs these no more."""
        if not batches:
            return

        def delete(database: sqlite3.Connection) -> None:
            for batch in batches:
                database.execute("UPDATE batches SET acknowledged = 1 WHERE id = ?", (batch.id,))
                for group in batch.groups:
                    delete_content(database, group.id)

        await self._write(delete)
        for batch in batches:
            del self.state.batches[batch.id]
            self.state.stored -= sum(group.size for group in batch.groups)
            self.state.acknowledged = max(self.state.acknowledged, batch.id)
            if batch.holder is not None:
                before = self.state.acknowledged_by.get(batch.holder, 0)
                self.state.acknowledged_by[batch.holder] = max(before, batch.id)

    async def reset(self) -> None:
        """Forget everything."""
        instance = uuid.uuid4().hex

        def delete(database: sqlite3.Connection) -> None:
            for table in ("groups", "batches", "environments", "chunks", "sqlite_sequence"):
                database.execute(f"DELETE FROM {table}")
            put_fact(database, "instance", instance)
            put_fact(database, "run", {})

        await self._write(delete)
        self.state = ApiState(instance=instance)

    async def content(self, groups: Iterable[Group]) -> AsyncIterator[bytes]:
        """The JSON objects of groups with commas between them, in pieces of about a megabyte."""
        for number, group in enumerate(groups):
            if number:
                yield b","
            for at in itertools.count():
                chunk = await self._run(self._database.chunk, group.id, at)
                if chunk is None:
                    break
                yield chunk

    # In the thread of the database.

    def _insert(self, bodies: Sequence[GroupBody]) -> list[Group | None]:
        now = time.time()
        added: list[Group | None] = []
        with self._database.transaction() as database:
            for body in bodies:
                values = (body.group_id, body.env_id, body.sequences, body.tokens, body.size, body.begin_step)
                cursor = database.execute(
                    "INSERT OR IGNORE INTO groups VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, NULL)",
                    (*values, orjson.dumps(body.scores).decode(), now),
                )
                if not cursor.rowcount:
                    _check_copy(database, body)
                    added.append(None)
                    continue
                assert cursor.lastrowid is not None
                put_content(database, cursor.lastrowid, body.pieces)
                added.append(
                    Group(
                        id=cursor.lastrowid,
                        group_id=body.group_id,
                        env_id=body.env_id,
                        sequences=body.sequences,
                        tokens=body.tokens,
                        size=body.size,
                        begin_step=body.begin_step,
                        scores=body.scores,
                        received=now,
                    )
                )
        return added

    def _load(self) -> ApiState:
        self._database.open()
        facts = self._database.facts()
        run = facts["run"]
        state = ApiState(instance=facts["instance"])
        for name in _RUN:
            setattr(state, name, run.get(name, getattr(state, name)))
        state.trainer = TrainerRegistration(**run["trainer"]) if run.get("trainer") else None
        with self._database.errors() as database:
            database.row_factory = sqlite3.Row
            rows = database.execute("SELECT value FROM environments ORDER BY id")
            state.environments = [RegisteredEnv(**orjson.loads(value)) for (value,) in rows]
            of_batches: dict[int, list[Group]] = {}
            select = f"SELECT {_GROUP} FROM groups WHERE batch_id"
            for row in database.execute(f"{select} IS NULL ORDER BY id"):
                group = _group(row)
                state.waiting[group.id] = group
            for row in database.execute(f"{select} IN (SELECT id FROM batches WHERE NOT acknowledged) ORDER BY id"):
                of_batches.setdefault(row[-1], []).append(_group(row))
            batches = "SELECT id, holder, given FROM batches WHERE NOT acknowledged ORDER BY id"
            for number, holder, given in database.execute(batches):
                state.batches[number] = PendingBatch(number, of_batches[number], holder, bool(given))
            held = itertools.chain(state.waiting.values(), *of_batches.values())
            state.stored = sum(group.size for group in held)
            last = "SELECT coalesce(max(id), 0), coalesce(max(id) FILTER (WHERE acknowledged), 0) FROM batches"
            state.last_batch, state.acknowledged = database.execute(last).fetchone()
            by = "SELECT holder, max(id) FROM batches WHERE acknowledged AND holder IS NOT NULL GROUP BY holder"
            state.acknowledged_by = dict(database.execute(by))
            (state.received,) = database.execute("SELECT count(*) FROM groups").fetchone()
            recent = database.execute(f"SELECT {_GROUP} FROM groups ORDER BY id DESC LIMIT {RECENT}")
            state.recent.extend(map(_group, recent))
        return state

    async def _write(self, change: Callable[[sqlite3.Connection], T], *, flush: bool = True) -> T:
        def write() -> T:
            with self._database.transaction(flush=flush) as database:
                return change(database)

        return await self._run(write)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        return await finish(self._database.run(function, *args))


def _check_copy(database: sqlite3.Connection, body: GroupBody) -> None:
    """That a group with an id which is there is that group, as far as the rows tell: ids of two runs may collide."""
    select = "SELECT sequences, tokens, scores FROM groups WHERE group_id = ?"
    sequences, tokens, scores = database.execute(select, (body.group_id,)).fetchone()
    if (sequences, tokens, tuple(orjson.loads(scores))) != (body.sequences, body.tokens, body.scores):
        raise GroupError(
            f"group_overrides.group_id {body.group_id!r} belongs to another group, which came before; ids must be "
            "unique in a database, across environments and runs"
        )


def _group(row: sqlite3.Row) -> Group:
    return Group(**{**dict(row), "scores": tuple(orjson.loads(row["scores"]))})
