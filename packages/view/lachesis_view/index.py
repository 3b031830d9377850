"""The index of a folder of runs: what pages ask of the tables that `FollowedFiles` keeps."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from backends.errors import LachesisError
from lachesis.figures.intervals import Mean, mean_of, mean_of_values, mean_over_items, score_range
from lachesis.figures.item_keys import whole_and_part
from lachesis.figures.tool_failures import ToolFailures
from lachesis.loop.rollout import DECLINED
from lachesis_messages.errors import MISSHAPEN
from lachesis_messages.records.jsonl import read_line
from lachesis_messages.records.step_files import SCHEMA
from lachesis_view.files import locks_of, written_now
from lachesis_view.filters import Filter
from lachesis_view.followed_files import COLUMNS, FollowedFiles
from lachesis_view.html.rollout import COMPONENT, last_words
from lachesis_view.metrics import most_frequent
from lachesis_view.names import group_name, places_of
from lachesis_view.reports.training import environments, on_files
from lachesis_view.reports.verdict import PARTS, REWARD, mean_of_steps
from lachesis_view.rows import parsed, storable
from lachesis_view.trained import as_group

FAILURES_OF = 2_000
"""Rollouts of which the failed calls of a run are shown."""
WARM_START = "warm-start"
"""The folder, in that of a training run, of the rollouts of reference policies on which it was trained first."""


class NoSuchGroup(LachesisError):
    """The index has no group of this run and number, or its file has changed since."""


@dataclass(frozen=True, slots=True)
class Page:
    """A part of the rollouts that a filter lets through, and how many these are."""

    rows: Sequence[Mapping[str, Any]]
    total: int


class Index(FollowedFiles):
    """The index of `root`: one thread calls `refresh` again and again, all others ask."""

    def ask(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """The rows of a query over the tables."""
        return self._database.execute(query, values).fetchall()

    @contextmanager
    def moment(self) -> Iterator[None]:
        """Within, all that this thread asks is of one moment, while others add to the tables."""
        database = self._database
        database.execute("BEGIN")
        try:
            yield
        finally:
            database.execute("ROLLBACK")

    def runs(self) -> list[dict[str, Any]]:
        """The runs, the latest first, each with its figures; `planned` items, 0 where its files do not say it;
        whether it is `running`: a process holds its lock; whether a trainer wrote it, whether it `trains`, as the
        `warm_start` of another run or not, and which `environments` its last step has; and where no rollouts are known,
        whether it trains `on_files`, and its last `loss`. The reward of a training run is that of its `last_steps`, as
        many as in the verdict of its report."""
        figures = {
            row["run"]: dict(row)
            for row in self._database.execute(
                "SELECT run, count(*) AS rollouts, count(DISTINCT number) AS groups, count(reward) AS scored, "
                f"count(*) FILTER (WHERE reward IS NULL AND cause = '{DECLINED}') AS declined, "
                "count(DISTINCT item) AS item_count, "
                "max(time) AS latest, "
                "avg(turns) AS turns, total(tokens) AS tokens, count(tokens) AS counted, "
                "total(calls) FILTER (WHERE errors IS NOT NULL) AS calls, total(errors) AS errors "
                "FROM rollouts GROUP BY run"
            )
        }
        outcomes: dict[str, dict[str, int]] = {}
        for row in self._database.execute("SELECT run, outcome, count(*) FROM rollouts GROUP BY 1, 2 ORDER BY 3 DESC"):
            outcomes.setdefault(row[0], {})[row[1]] = row[2]
        rewards = self._rewards()
        # What is only measured at step 0, before training on files, is none.
        counted = (
            "SELECT run, count(*) FILTER (WHERE step OR instr(line, '\"train/reward\":')) AS steps, "
            "max(time) AS latest FROM steps GROUP BY run"
        )
        steps = {row["run"]: row for row in self._database.execute(counted)}
        trained = {row[0] for row in self._database.execute("SELECT DISTINCT run FROM files WHERE kind = 'trained'")}
        locks: dict[str, set[Path]] = {}
        for row in self._database.execute("SELECT run, path, kind FROM files WHERE kind != 'trained'"):
            locks.setdefault(row["run"], set()).update(locks_of(self.root / row["path"]))
        written = written_now(set().union(*locks.values()))
        found = []
        for row in self._database.execute("SELECT * FROM runs"):
            name = row["name"]
            last = self.ask("SELECT line FROM steps WHERE run = ? ORDER BY step DESC LIMIT 1", name)
            line = parsed(last[0][0]) if last else {}
            step = {} if name in figures else line
            of_steps = self._last_steps(name) if last else None
            latest = max(each[name]["latest"] or 0.0 if name in each else 0.0 for each in (figures, steps))
            found.append(
                {
                    **dict.fromkeys(
                        ("rollouts", "groups", "item_count", "scored", "declined", "calls", "errors", "counted"), 0
                    ),
                    **dict.fromkeys(("turns", "tokens")),
                    **figures.get(name, {}),
                    **row,
                    "settings": parsed(row["settings"]),
                    "trained": name in trained,
                    "trains": name in steps,
                    "warm_start": WARM_START in name.split("/"),
                    "running": not written.isdisjoint(locks.get(name, ())),
                    "latest": latest,
                    "outcomes": outcomes.get(name, {}),
                    "reward": of_steps or rewards.get(name),
                    "last_steps": of_steps.items if of_steps else 0,
                    "steps": steps[name]["steps"] if name in steps else 0,
                    "environments": environments([line]),
                    "on_files": on_files([step]),
                    "loss": step.get("train/loss"),
                }
            )
        return sorted(found, key=lambda run: -run["latest"])

    def _last_steps(self, run: str) -> Mean | None:
        """Of the last fifth of the steps that have a reward, which are its `items`; None where there is none."""
        of_reward = f"FROM steps WHERE run = ?1 AND instr(line, '\"{REWARD}\":')"
        query = f"SELECT line {of_reward} ORDER BY step DESC LIMIT max(1, (SELECT count(*) {of_reward}) / {PARTS})"
        with suppress(*MISSHAPEN):
            lines = [line for row in self.ask(query, run) if (line := parsed(row[0]))[REWARD] is not None]
            if math.isfinite((mean := mean_of_steps(lines, REWARD))[0]):
                return Mean(*mean, len(lines))
        return None

    def _rewards(self) -> dict[str, Mean]:
        """Of each run with a score, as `mean_over_items` has it."""
        query = (
            "SELECT run, avg(reward), min(reward), max(reward) FROM rollouts WHERE reward IS NOT NULL "
            "GROUP BY run, item"
        )
        runs: dict[str, tuple[list[float], list[float]]] = {}
        for run, middle, low, high in self._database.execute(query):
            means, ends = runs.setdefault(run, ([], []))
            means.append(min(max(middle, low), high))  # the sum of large ones is infinite
            ends += [low, high]
        return {run: mean_of_values(means, *score_range(ends)) for run, (means, ends) in runs.items()}

    def settings(self, run: str) -> dict[str, Any]:
        """The settings of a run; none where it has no manifest."""
        row = self._database.execute("SELECT settings FROM runs WHERE name = ?", (run,)).fetchone()
        return {} if row is None else parsed(row[0])

    def file_of(self, run: str, number: int) -> Path:
        """The file that has the line of a group. Raises NoSuchGroup."""
        return self.root / str(self._place(run, number)["path"])

    def name_of(self, run: str, number: int) -> str:
        """A group for people: in an evaluation, its item and which rollout of it this is. Raises NoSuchGroup."""
        return self._name(self._place(run, number))

    def _name(self, row: sqlite3.Row) -> str:
        trained = row["kind"] == "trained"
        item, sample = whole_and_part("" if trained else row["key"] or "")
        at = places_of(self.root / row["path"]).get(item)
        return group_name(row["number"], trained) if at is None else f"item {at}, rollout {sample}"

    def _place(self, run: str, number: int) -> sqlite3.Row:
        """Where the line of a group is. Raises NoSuchGroup."""
        row: sqlite3.Row | None = self._database.execute(
            "SELECT number, path, kind, start, length, key FROM groups JOIN files ON files.id = file "
            "WHERE groups.run = ? AND number = ?",
            (run, number),
        ).fetchone()
        if row is None:
            raise NoSuchGroup(f"{run} has no group {number}")
        return row

    def group(self, run: str, number: int) -> dict[str, Any]:
        """The line of a group, parsed.

        Raises:
            NoSuchGroup: there is none, or its file has been replaced and is not read again yet.
        """
        row = self._place(run, number)
        try:
            with (self.root / row["path"]).open("rb") as file:
                file.seek(row["start"])
                content: dict[str, Any] = read_line(file.read(row["length"]))
            if content["schema"] == SCHEMA:
                content = as_group(content)
            content["rollouts"]
            if storable(content["item_key"]) != row["key"]:
                raise ValueError("another group")
        except (OSError, *MISSHAPEN) as error:
            raise NoSuchGroup(f"{row['path']} has changed since it was indexed; load the page again") from error
        return content

    def rollouts(self, filter: Filter, page_size: int = 100) -> Page:
        """One page of the rollouts that a filter lets through, in its order."""
        where, values = filter.where()
        total = self._database.execute(f"SELECT count(*) FROM rollouts WHERE {where}", values).fetchone()[0]
        rows = self._database.execute(
            f"SELECT {COLUMNS}, (SELECT kind FROM files WHERE files.id = file) AS kind, "
            "(SELECT path FROM files WHERE files.id = file) AS path, "
            "(SELECT key FROM groups WHERE groups.run = rollouts.run AND groups.number = rollouts.number) AS key, "
            "(SELECT group_concat(tag, ' ') FROM notes WHERE notes.run = rollouts.run "
            "AND notes.number = rollouts.number AND notes.n = rollouts.n) AS tags "
            f"FROM rollouts WHERE {where} ORDER BY {filter.order} LIMIT ? OFFSET ?",
            (*values, page_size, page_size * (filter.page - 1)),
        )
        return Page([{**row, "name": self._name(row)} for row in rows], total)

    def neighbours(self, filter: Filter, place: tuple[str, int, int]) -> tuple[Any, Any]:
        """The rollouts before and after one (run, number, n) in the list of a filter; None at its ends, and for one
        that the filter does not let through."""
        where, values = filter.where()
        query = (
            "SELECT before, after FROM "
            "(SELECT run, number, n, lag(id) OVER listed AS before, lead(id) OVER listed AS after "
            f"FROM rollouts WHERE {where} WINDOW listed AS (ORDER BY {filter.order})) "
            "WHERE run = ? AND number = ? AND n = ?"
        )
        ids = self._database.execute(query, (*values, *place)).fetchone() or (None, None)
        rows = (
            self._database.execute("SELECT run, number, n FROM rollouts WHERE id = ?", (id,)).fetchone() for id in ids
        )
        before, after = (None if row is None else tuple(row) for row in rows)
        return before, after

    def elsewhere(self, run: str, key: str, most: int = 12) -> list[dict[str, Any]]:
        """Rollouts of the same item, by the key of a group, in the other runs: `run`, `number`, `n`, `reward`;
        the first one of each group, and no more than `most`."""
        item = storable(key.partition("+")[0])
        query = (
            "SELECT runs.name AS run, groups.number, n, reward FROM runs JOIN groups ON groups.run = runs.name "
            "JOIN rollouts ON rollouts.run = runs.name AND rollouts.number = groups.number AND n = 0 "
            "WHERE runs.name != ? AND environment = (SELECT environment FROM runs WHERE name = ?) "
            "AND (key = ? OR key > ? AND key < ?) ORDER BY runs.name, groups.number LIMIT ?"
        )
        values = (run, run, item, f"{item}+", f"{item},", most)  # samples of an item are KEY+1, KEY+2, ...
        return [dict(row) for row in self._database.execute(query, values)]

    def choices(self) -> dict[str, list[str]]:
        """The runs, outcomes, causes and tags that occur."""
        return {
            name: [row[0] for row in self._database.execute(f"SELECT DISTINCT {name} FROM {table} ORDER BY 1")]
            for name, table in (("run", "rollouts"), ("outcome", "rollouts"), ("cause", "rollouts"), ("tag", "notes"))
        }

    def note(self, run: str, number: int, n: int) -> dict[str, Any]:
        """The `tags` of a rollout, and the `note` about it."""
        rows = self.ask("SELECT tag, note FROM notes WHERE run = ? AND number = ? AND n = ?", run, number, n)
        return {"tags": [tag for tag, _ in rows if tag], "note": "".join(note for _, note in rows)}

    def metric_names(self, runs: Sequence[str]) -> list[str]:
        """Components of rewards and metrics of environments, the most frequent first."""
        return _names(self._by_item(runs))

    def measured(self, runs: Sequence[str]) -> list[tuple[str, float | None, list[tuple[Mean, int]]]]:
        """Components and metrics, those of the largest weight first: the name; the weight in the reward of the last
        run, or None; and of each run the mean over items, for a component with its interval, and how many rollouts have
        it."""
        found, weights = self._by_item(runs), self._weights(runs[-1])
        names = sorted(_names(found), key=lambda name: -abs(weights.get(name, 0.0)))
        return [
            (name, weights.get(name), [(_mean(of, name), sum(map(len, of.values()))) for of in found[name]])
            for name in names
        ]

    def _by_item(self, runs: Sequence[str]) -> dict[str, list[dict[str, list[float]]]]:
        """The values of components and metrics by name: of each run, those of its items."""
        found: dict[str, list[dict[str, list[float]]]] = {}
        for place, run in enumerate(runs):
            query = "SELECT item, metrics FROM rollouts WHERE run = ? AND metrics IS NOT NULL"
            for item, metrics in self._database.execute(query, (run,)):
                for name, value in orjson.loads(metrics).items():
                    found.setdefault(name, [{} for _ in runs])[place].setdefault(item, []).append(value)
        return found

    def _weights(self, run: str) -> dict[str, float]:
        """Of the components in the reward, as the latest rollout with one records them."""
        query = "SELECT number, n FROM rollouts WHERE run = ? AND reward IS NOT NULL ORDER BY id DESC LIMIT 1"
        for number, n in self._database.execute(query, (run,)).fetchall():
            with suppress(NoSuchGroup, *MISSHAPEN):
                weights = self.group(run, number)["rollouts"][n].get("reward_weights") or {}
                return {f"{COMPONENT}{name}": float(weight) for name, weight in weights.items()}
        return {}

    def of_item(self, run: str, number: int) -> list[tuple[int, int, str]]:
        """The rollouts beside which a rollout of a group stands: those of the same item of an evaluation, or else of
        the group. Each with its group, its place in it and its number for people."""
        if ", rollout " not in self.name_of(run, number):
            query = "SELECT number, n FROM rollouts WHERE run = ? AND number = ? ORDER BY n"
            return [(at, n, f"{n}") for at, n in self._database.execute(query, (run, number))]
        query = (
            "SELECT number, n FROM rollouts WHERE run = ?1 AND item = "
            "(SELECT item FROM rollouts WHERE run = ?1 AND number = ?2 LIMIT 1) LIMIT 64"
        )
        found = self._database.execute(query, (run, number)).fetchall()
        named = [(at, n, self.name_of(run, at).partition(", rollout ")[2]) for at, n in found]
        return sorted(named, key=lambda each: int(each[2] or 0))

    def unscored(self, run: str) -> list[dict[str, Any]]:
        """Why rollouts of a run lack the score that they should have, most frequent first: `cause`, `count`, and of the
        first such rollout its place (`number`, `n`) and `said`, the line that its error ends with."""
        query = (
            "SELECT cause, count(*) AS count, number, n, min(id) FROM rollouts WHERE run = ? AND reward IS NULL "
            f"AND cause != '{DECLINED}' GROUP BY cause ORDER BY 2 DESC"
        )
        found = []
        for row in self._database.execute(query, (run,)).fetchall():
            said = ""
            with suppress(NoSuchGroup, *MISSHAPEN):
                group = self.group(run, row["number"])
                said = last_words(group, group["rollouts"][row["n"]])
            found.append({**row, "said": said})
        return found

    def tool_failures(self, run: str) -> list[tuple[str, int, int, list[tuple[str, int]]]]:
        """The tools of the latest `FAILURES_OF` rollouts: name, failed calls, calls, and reasons with counts. Those
        that failed most come first, as do the most frequent reasons."""
        query = "SELECT tools FROM rollouts WHERE run = ? AND tools IS NOT NULL ORDER BY id DESC LIMIT ?"
        found = ToolFailures()
        for (tools,) in self._database.execute(query, (run, FAILURES_OF)).fetchall():
            found.add_rows((name, *counts) for name, counts in orjson.loads(tools).items())
        rows = sorted(found.to_rows(), key=lambda row: (-row[2], -row[1]))
        return [(name, failed, calls, sorted(why, key=lambda each: -each[1])) for name, calls, failed, why in rows]

    def history(self, run: str) -> list[sqlite3.Row]:
        """The data of the curves: every rollout of a run, in the order of its groups' ends."""
        query = (
            "SELECT number, item, reward, outcome, cause, turns, calls, errors, tokens, seconds, metrics, time, kind "
            "FROM rollouts JOIN files ON files.id = file WHERE rollouts.run = ? ORDER BY time, number, n"
        )
        return self._database.execute(query, (run,)).fetchall()

    def steps(self, run: str) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` of a training run."""
        return [
            parsed(row[0])
            for row in self._database.execute("SELECT line FROM steps WHERE run = ? ORDER BY step", (run,))
        ]


def _names(found: Mapping[str, Sequence[Mapping[str, Sequence[float]]]]) -> list[str]:
    return most_frequent(
        {name: sum(len(values) for of in runs for values in of.values()) for name, runs in found.items()}
    )


def _mean(of_items: Mapping[str, Sequence[float]], name: str) -> Mean:
    """Of a component, or of a metric, of which there may be many: those have no interval."""
    if name.startswith(COMPONENT) or not of_items:
        return mean_over_items(list(of_items.values()))
    return Mean(mean_of([*map(mean_of, of_items.values())]), math.nan, math.nan, len(of_items))
