"""`HermesSweEnv`: correct the code of a Python package, judged by hidden tests that cannot be forged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lachesis_envs.harbor.environment import HarborEnv
from lachesis_envs.swe.archives import cache_folder
from lachesis_envs.swe.building import hunks, read_fixes, write_swe_task
from lachesis_envs.task_folders import TaskError, TaskProblem
from lachesis_envs.task_folders.task import Task, files_below
from lachesis_messages.messages import Message, ToolCall

if TYPE_CHECKING:
    from lachesis import Policy

FIXES = "fixes"
"""The `dataset_name` of the real fixes of the recipe, which are built where they are missing."""


class HermesSweEnv(HarborEnv):
    """Plays tasks that have `[metadata.lachesis.judge]`; 1.0 where every expected test passes, and none is forged."""

    name = "swe"
    dataset_name = FIXES
    max_turns = 60
    system_prompt = (
        "You are a software engineer. You work in a Linux sandbox without a network. Find the cause of the problem "
        "that you are given, correct the code with the tools, run its tests, and say when you are done."
    )

    def task_folders(self) -> list[Path]:
        return built_fixes() if self.config.dataset_name == FIXES else super().task_folders()

    def find_tasks(self) -> list[Task]:
        tasks = super().find_tasks()
        problems = [
            TaskProblem(
                task.folder / "task.toml",
                "[metadata.lachesis] judge",
                "this environment runs tasks with hidden pytest suites",
                "run it with environments/harbor_env.py, or add the table, see docs/swe.md",
            )
            for task in tasks
            if not task.own_settings.get("judge")
        ]
        if problems:
            raise TaskError(problems)
        return tasks

    def reference_policy(self) -> Policy:
        """Knows the solution: reads each file that it changes, edits it, runs the tests that are there, and ends."""

        def policy(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None) -> Message:
            prompt = next(message["content"] for message in messages if message["role"] == "user")
            task = next(task for task in self.tasks.values() if task.steps[0].instruction == prompt)
            done = sum(message["role"] == "assistant" for message in messages)
            calls = scripted_calls(task)
            if done == len(calls):
                return Message("assistant", "The code is corrected.")
            name, arguments = calls[done]
            return Message("assistant", tool_calls=(ToolCall(f"call_{done}", name, json.dumps(arguments)),))

        return policy


def built_fixes() -> list[Path]:
    """The folders of the tasks of this recipe, in the cache; those that were missing are built. Other recipes have
    others."""
    made_by = hashlib.sha256()
    for file in sorted(files_below(Path(__file__).parent)):
        if "__pycache__" not in file.parts:
            made_by.update(b"%s %d\0" % (file.name.encode(), file.stat().st_size) + file.read_bytes())
    cache = cache_folder().parent / "swe-tasks" / made_by.hexdigest()[:16]
    folders = {cache / task.name: task for task in read_fixes()}
    for folder, task in folders.items():
        if not (folder / "task.toml").is_file():
            try:
                write_swe_task(task, folder)
            except TaskError:
                if not (folder / "task.toml").is_file():  # else another process was faster
                    raise
    return sorted(folders)


def scripted_calls(task: Task) -> list[tuple[str, Mapping[str, Any]]]:
    """The calls of an agent that knows the solution: read, edit, test."""
    calls: list[tuple[str, Mapping[str, Any]]] = []
    base, solution = task.folder / "environment", task.folder / "solution"
    if (base / "repo").is_dir():  # else the task was a row of humanevalpack
        base, solution = base / "repo", solution / "files"
    for file in sorted(files_below(solution)):
        path = file.relative_to(solution).as_posix()
        if path == "solve.sh":
            continue
        old, new = (base / path).read_bytes(), file.read_bytes()
        found = hunks(old, new)
        calls.append(("read_file", {"path": path, "offset": max(1, found[0][0] - 20), "limit": 100}))
        lines = old.splitlines(keepends=True)
        for begin, end, text in reversed(found):  # from the end: what is above keeps its place
            before, after = begin, end
            while before > 0 and (before == after or old.count(b"".join(lines[before:after])) > 1):
                before, after = before - 1, min(after + 1, end + 1)
            replaced = [*lines[before:begin], *text, *lines[end:after]]
            calls.append(
                (
                    "patch",
                    {
                        "mode": "replace",
                        "path": path,
                        "old_string": b"".join(lines[before:after]).decode(),
                        "new_string": b"".join(replaced).decode(),
                    },
                )
            )
    judge = task.own_settings["judge"]
    if tests := judge.get("not_sources"):
        calls.append(("terminal", {"command": f"{judge['python']} -m pytest -q {tests[0]}", "timeout": 300}))
    return calls
