"""`lachesis tasks build|convert|show|verify`: task folders in Harbor's format."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from backends.errors import SettingsError
from backends.text import counted
from lachesis.cli.subcommands import run_subcommand
from lachesis.cli.verb_parser import VerbParser, count
from lachesis_envs.task_folders import Task, TaskError, create_row_task, find_tasks, read_task, row_name, write_task

SUBCOMMANDS = {
    "build": (
        "lachesis_envs.verbs.tasks_build:main",
        "write real fixes of Python packages, and mutations, as task folders",
    ),
    "convert": ("lachesis_envs.verbs.tasks:convert", "write tasks of other formats as folders in Harbor's format"),
    "show": ("lachesis_envs.verbs.tasks:show", "what tasks need, and why some of them cannot be run"),
    "verify": (
        "lachesis_envs.verbs.tasks_verify:main",
        "run tasks with their solution, an idle agent and attacks, and say which are graded soundly",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    return run_subcommand("lachesis tasks", __doc__, SUBCOMMANDS, argv)


def show(argv: Sequence[str]) -> int:
    """Print one line a task; 1 if one of them cannot be run."""
    parser = VerbParser(prog="lachesis tasks show", description=SUBCOMMANDS["show"][1])
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a task, a folder with tasks in it, or a glob")
    parser.add_argument("--json", action="store_true", help="print one JSON object a task, with all settings")
    arguments = parser.parse_args(argv)
    good = bad = 0
    for folder in [folder for path in arguments.paths for folder in find_tasks(path)]:
        try:
            task = read_task(folder)
        except TaskError as error:
            print(f"error: {error}", file=sys.stderr)
            bad += 1
            continue
        good += 1
        print(json.dumps(_described(task), default=str) if arguments.json else "  ".join(_line(task)))
    print(f"{counted(good, 'task')}, {bad} that cannot be run", file=sys.stderr)
    return 1 if bad else 0


def _line(task: Task) -> list[str]:
    environment, step = task.environment, task.steps[0]
    return [
        task.name,
        counted(len(task.steps), "step"),
        environment.docker_image or "Dockerfile",
        step.agent.network_mode or "",
        f"{'no limit' if step.agent.timeout_sec is None else f'{step.agent.timeout_sec:g} s'}",
        f"{step.verifier.environment_mode} verifier",
        "solution" if all(step.solution for step in task.steps) else "no solution",
        task.digest[:12],
    ]


def _described(task: Task) -> dict[str, Any]:
    steps = [
        {
            "name": step.name,
            "solution": step.solution is not None,
            "agent": step.agent.model_dump(mode="json"),
            "verifier": step.verifier.model_dump(mode="json"),
        }
        for step in task.steps
    ]
    return {
        "name": task.name,
        "folder": str(task.folder),
        "digest": task.digest,
        "steps": steps,
        "config": task.config.model_dump(mode="json"),
    }


def convert(argv: Sequence[str]) -> int:
    """Write each task or row of the source into its own folder; 1 if one of them could not be written."""
    parser = VerbParser(prog="lachesis tasks convert", description=SUBCOMMANDS["convert"][1])
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="tasks of Terminal-Bench 1 or Harbor; or rows of SWE-bench's, R2E-Gym's or humanevalpack's shape: a JSON "
        "Lines file, or the name of a data set",
    )
    parser.add_argument("target", type=Path, metavar="FOLDER", help="gets a folder for each task")
    parser.add_argument("--split", default="test", help="of a data set (default: test)")
    parser.add_argument(
        "--config", metavar="NAME", help="configuration of a data set, such as 'python' of humanevalpack"
    )
    parser.add_argument(
        "--columns",
        default="{}",
        metavar="YAML",
        help="our name of a column: its name in the rows, '{patch: gold_patch}'",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="only the first N")
    arguments = parser.parse_args(argv)
    try:
        columns = yaml.safe_load(arguments.columns)
    except yaml.YAMLError as error:
        raise SettingsError(f"--columns is not YAML: {error}") from None
    if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns.values()):
        raise SettingsError("--columns takes a mapping such as '{patch: gold_patch}'")
    written, failed = 0, 0
    taken: Counter[str] = Counter()
    for source, name in _sources(arguments, columns)[: arguments.limit]:
        taken[name] += 1
        name = f"{name}-{taken[name]}" if taken[name] > 1 else name  # x/y and x_y, or two folders of the same name
        try:
            if isinstance(source, Path):
                write_task(read_task(source, to_play=False), arguments.target / name)
            else:
                create_row_task(source, arguments.target / name, columns=columns)
            written += 1
        except TaskError as error:
            print(f"error: {error}", file=sys.stderr)
            failed += 1
    print(f"{counted(written, 'task')} written to {arguments.target}, {failed} could not be converted", file=sys.stderr)
    return 1 if failed or not written else 0


def _sources(arguments: argparse.Namespace, columns: dict[str, str]) -> list[tuple[Path | dict[str, Any], str]]:
    """Folders or rows, each with the name of its new folder."""
    place = Path(arguments.source).expanduser()
    if place.is_dir() and not any(place.glob("*.jsonl")):
        return [(folder, folder.name) for folder in find_tasks(place)]
    from lachesis.runs.dataset_rows import load_rows

    rows = load_rows(arguments.source, arguments.split, config=arguments.config)
    named = [{**row, **{ours: row.get(theirs) for ours, theirs in columns.items()}} for row in rows]
    return [(row, row_name(other, number)) for number, (row, other) in enumerate(zip(rows, named, strict=True))]
