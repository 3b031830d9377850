"""`lachesis eval regrade DATA`: grade the artifacts of a finished run again, with the current verifiers.

Writes a new groups file next to the old one, which does not change, and prints the differences. Exit code 0: all is
graded. 1: artifacts are missing, or a sandbox failed; nothing is written then.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from backends import create_backend
from backends.errors import SettingsError
from backends.text import counted
from lachesis.cli.subcommands import check
from lachesis.cli.verb_parser import VerbParser
from lachesis.figures.intervals import mean_over_items
from lachesis.runs.run_folder import settings_of
from lachesis.settings.flags import accepts
from lachesis_messages.records.groups import GroupRecord, read_groups
from lachesis_messages.records.jsonl import JsonlWriter
from lachesis_view.pairs import paired

_OF_THE_RUN = (
    *("terminal_backend", "sandbox", "sandbox_profile", "terminal_image", "terminal_workdir", "terminal_network"),
    *("terminal_cpus", "terminal_memory", "terminal_pids", "terminal_disk", "task_images", "task_limits", "grading"),
)
"""Settings that are those of the run, as its manifest has them, where no flag gives another value."""
_SHOWN = 20
"""Rollouts with a change that are listed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Grade, write the file and print what changed."""
    from lachesis_envs.harbor.environment import HarborEnvConfig
    from lachesis_envs.harbor.regrading import kept_rollouts, regrade, regraded_groups

    parser = VerbParser(prog="lachesis eval regrade", description=__doc__)
    parser.add_argument("data", type=Path, metavar="DATA", help="folder of a run, or its samples.jsonl or groups.jsonl")
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, metavar="N", help="sandboxes at once")
    for name in (*_OF_THE_RUN, "terminal_env", "terminal_options"):
        field = HarborEnvConfig.model_fields[name]
        read = str if accepts(field.annotation, str) else yaml.safe_load
        parser.add_argument(
            f"--env.{name}",
            dest=name,
            default=argparse.SUPPRESS,
            type=read,
            metavar="VALUE",
            help=field.description,
            rare=name != "terminal_backend",
        )
    arguments = parser.parse_args(argv)
    path = _groups_file(arguments.data)
    settings = settings_of(path)
    given = {name: settings[name] for name in _OF_THE_RUN if name in settings} | {
        name: value for name, value in vars(arguments).items() if name in HarborEnvConfig.model_fields
    }
    try:
        config = HarborEnvConfig(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(f"--env.{e['loc'][0]}: {e['msg']}" for e in error.errors())) from None
    before = partial(_groups, path)
    rollouts = kept_rollouts(before(), path.parent, config)
    done = itertools.count(1)

    def graded() -> None:
        if sys.stderr.isatty():
            print(f"\r{next(done)}/{len(rollouts)} graded", end="", file=sys.stderr, flush=True)

    found = asyncio.run(_in_sandboxes(rollouts, config, regrade, max(1, arguments.at_once), graded))
    out = next(new for new in _names(path) if not new.exists())
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with JsonlWriter(temporary) as writer:
            writer.write_all(regraded_groups(before(), found))
        os.link(temporary, out)  # it replaces nothing
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{counted(len(rollouts), 'rollout')} graded again: {out}")
    _show(list(before()), list(read_groups(out)))
    return 0


async def _in_sandboxes(rollouts: Any, config: Any, regrade: Any, at_once: int, graded: Any) -> Any:
    try:
        backend = create_backend(config.terminal_backend, **config.backend_options())
    except ValueError as error:
        raise SettingsError(f"--env.terminal_backend {config.terminal_backend!r}: {error}") from error
    await check(backend)
    return await regrade(rollouts, backend, config, at_once=at_once, graded=graded)


def _groups_file(data: Path) -> Path:
    found = [data] if data.is_file() else [data / name for name in ("samples.jsonl", "groups.jsonl")]
    for path in found:
        if path.is_file():
            return path
    raise SettingsError(f"{data}: has no samples.jsonl and no groups.jsonl; name the folder of a finished run")


def _groups(path: Path) -> Iterator[dict[str, Any]]:
    """Those of the file, and the ones in which nothing could be scored: a verifier may have been to blame."""
    yield from read_groups(path)
    failed = path.with_suffix(".failed.jsonl")
    if failed.is_file():
        yield from read_groups(failed)


def _names(path: Path) -> Iterator[Path]:
    yield path.with_suffix(".regraded.jsonl")
    for number in itertools.count(2):
        yield path.with_suffix(f".regraded-{number}.jsonl")


def _show(before: Sequence[GroupRecord], after: Sequence[GroupRecord]) -> None:
    old, new = ([[rollout["reward"] for rollout in group["rollouts"]] for group in each] for each in (before, after))
    print(f"mean reward: {mean_over_items(old)} before, {mean_over_items(new)} now; difference {paired(old, new)}")
    invalid = [sum(reward is None for each in scores for reward in each) for scores in (old, new)]
    print(f"invalid: {invalid[0]} before, {invalid[1]} now")
    changes = [
        (group, rollout)
        for group in after
        for rollout in group["rollouts"]
        if "regraded" in rollout and rollout["regraded"]["reward"] != rollout["reward"]
    ]
    print(f"changed: {counted(len(changes), 'reward')}")
    for group, rollout in changes[:_SHOWN]:
        print(
            f"  {_name(group['item'])} {rollout['rollout_id']}: {rollout['regraded']['reward']} -> {rollout['reward']}"
        )
    if len(changes) > _SHOWN:
        print(f"  and {len(changes) - _SHOWN} more; `regraded` in the rollouts of the new file has all of them")


def _name(item: Mapping[str, Any]) -> str:
    return str(item.get("name") or item["task"])
