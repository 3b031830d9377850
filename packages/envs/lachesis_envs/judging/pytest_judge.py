"""An existing pytest suite as a judge of code that runs in the suite's own interpreter.

Code under test can reach everything in that interpreter, pytest and this reporter included. So no outcome is believed
by itself. Every test runs twice, in two fresh sandboxes: once as it is, once changed so that a right solution fails it
(`changed_tests`). Which half of the tests is changed in the first run is drawn at random and known only to this
process. A test counts where it passed as it is and failed when changed; where it passed both, it is forged. Who wants
to forge has to guess for each test which run has the right one. That holds also where the code of both runs
talks: sandboxes of one machine have nothing in common but its kernel and processors, which are enough for that.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import pkgutil
import posixpath
import random
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends import Sandbox
from backends.first_use import parse
from backends.host.folders import cache_folder
from backends.tasks import in_own_thread, run_all
from lachesis.loop.judgement import Judgement, TestVerdict
from lachesis.rewards.reward import RewardError
from lachesis.tool_context.artifacts import Artifacts, placed, resolved
from lachesis.tool_context.file_copies import members
from lachesis.tool_context.own_folder import own_folder
from lachesis.tool_context.pace import MARGIN, USABLE, OwnTime, Pace, pace
from lachesis_envs.judging.changed_tests import ENDED, Change, Found, TestFile, found_test
from lachesis_envs.judging.fixtures import Fixtures
from lachesis_tools import ToolSession

_OUTPUT = 10_000_000
"""Bytes of a report, and of what pytest prints, that are read."""
other_changes: ContextVar[bytes] = ContextVar("lachesis_other_changes", default=b"")
"""Tests are changed to something else for each value: to find those that are changed soundly by chance. Such gradings
should not meet others of the same tests: see `_steady`."""
_TRIAL = "def test_trial():\n    pass\n"


@dataclass(frozen=True, slots=True)
class _Run:
    """A run of the suite."""

    outcomes: Mapping[str, str]
    """By id as pytest knows it."""
    output: str
    late: OwnTime | None
    """What it took, where the time limit ended it."""


@dataclass(slots=True)
class PytestJudge:
    """The suite, and where it is run."""

    tests: Mapping[str, str | bytes | Path]
    expect: Sequence[str]
    python: str
    args: Sequence[str]
    timeout: float
    open_fresh: Callable[[], ToolSession]
    random: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        self.expect = list(dict.fromkeys([self.expect] if isinstance(self.expect, str) else self.expect))
        self.args = [self.args] if isinstance(self.args, str) else list(self.args)
        if not self.expect:
            raise RewardError("judge_pytest: expect is empty. Next step: name the ids of the tests that must pass")

    async def judge(self, artifacts: Artifacts, *, allow: Iterable[str], rounds: int) -> Judgement:
        """Raises `RewardError` for what the environment has to correct, and `BackendError`."""
        allow = [allow] if isinstance(allow, str) else list(allow)
        outcomes: dict[bool, list[dict[str, str]]] = {True: [], False: []}
        kinds: dict[str, Change] = {}
        started, output = False, ""
        for _ in range(rounds):
            first = self.open_fresh()
            try:
                await self._check_targets(artifacts, first, allow)
                files = await self._files(first)
                conftests = await self._conftests(first, files)
                plan = await in_own_thread(_Plan, files, self.expect, self.random, conftests, other_changes.get())
                kinds = {**plan.changes, **kinds}

                runs = await run_all(
                    self._run(fresh, artifacts, allow, plan, second, self.timeout)
                    for fresh, second in ((first, False), (first.another(), True))
                )
            finally:
                await first.close()
            if any(run.late for run in runs):
                runs = await self._with_time(artifacts, allow, plan, runs)
            output = runs[1].output
            for second, found in enumerate(run.outcomes for run in runs):
                started = started or not {"passed", "failed"}.isdisjoint(found.values())
                for changed in (True, False):
                    ids = [id for id in self.expect if (id in plan.first) is not (bool(second) is changed)]
                    outcomes[changed].append({id: found.get(plan.names(id, changed), "missing") for id in ids})
        if not started:
            await self._try_pytest()
        verdicts = {}
        for id in self.expect:
            seen = [[found[id] for found in outcomes[changed] if id in found] for changed in (False, True)]
            plain, changed_ = (_worst(each, good) for each, good in zip(seen, _GOOD, strict=True))
            verdicts[id] = TestVerdict(plain, changed_, kinds[id].kind, kinds[id].shown)
        return Judgement(verdicts, output, tuple(artifacts.missing), dict(artifacts.refused))

    async def _check_targets(self, artifacts: Artifacts, fresh: ToolSession, allow: list[str]) -> None:
        targets = await resolved([*artifacts.taken, *artifacts.missing, *artifacts.refused], fresh, allow)
        for path, (_, problem) in targets.items():
            if problem:
                raise RewardError(f"judge_pytest: source {path!r}: {problem}")

    async def _files(self, fresh: ToolSession) -> dict[str, TestFile | bytes]:
        """The files of the suite, by path: those of `tests`, and those of `expect` that are in the fresh tree."""
        files: dict[str, TestFile | bytes] = {}
        needed = dict.fromkeys(id.partition("::")[0] for id in self.expect)
        sandbox = await fresh.sandbox()
        for path in dict.fromkeys((*self.tests, *needed)):
            given = self.tests.get(path)
            if given is None:
                try:
                    given = await sandbox.read_bytes(await fresh.path(path))
                except OSError as error:
                    raise RewardError(
                        f"judge_pytest: the file {path!r} of expected tests is neither in `tests` nor in the fresh "
                        f"tree ({error.strerror}). Next step: give its text in `tests`"
                    ) from error
            data = await _content(given)
            if path not in needed:
                files[path] = data
                continue
            try:
                files[path] = await in_own_thread(TestFile, path, data)
            except (SyntaxError, ValueError) as error:
                raise RewardError(
                    f"judge_pytest: the tests in {path!r} cannot be read by the Python of this process: {error}. Next "
                    "step: correct the file, or run with a Python that knows its syntax"
                ) from error
        return files

    async def _conftests(self, fresh: ToolSession, files: Mapping[str, TestFile | bytes]) -> list[bytes]:
        """Those of the fresh tree that apply to expected tests with parameters: their fixtures may take these."""
        folders, found = set(), []
        for path, file in files.items():
            if isinstance(file, TestFile) and b"parametrize" in file.source:
                parts = posixpath.normpath(path).split("/")[:-1]
                folders |= {"/".join([*parts[:count], "conftest.py"]) for count in range(len(parts) + 1)}
        for path in sorted(folders - files.keys() - {"/conftest.py"}):
            with contextlib.suppress(OSError):
                found.append(await (await fresh.sandbox()).read_bytes(await fresh.path(path)))
        return found

    async def _run(
        self,
        fresh: ToolSession,
        artifacts: Artifacts,
        allow: Iterable[str],
        plan: _Plan,
        second: bool,
        timeout: float,
    ) -> _Run:
        await artifacts.place(fresh, allow, exactly=True)
        sandbox = await fresh.sandbox()
        await _write_all(fresh, await in_own_thread(plan.files, second))
        changed = {id for id in self.expect if (id in plan.first) is not second}
        return await self._report(
            sandbox,
            ended=[id for id in changed if plan.changes[id].kind == ENDED and not plan.changes[id].edits],
            args=["--rootdir=.", *self.args, *dict.fromkeys(id.partition("::")[0] for id in self.expect)],
            expected=[plan.names(id, id in changed) for id in self.expect],
            timeout=timeout,
        )

    async def _with_time(
        self, artifacts: Artifacts, allow: Iterable[str], plan: _Plan, runs: Sequence[_Run]
    ) -> list[_Run]:
        """Repeat late runs that a busy machine may have kept from their end, one at a time and with as much processor
        time as a free one gives."""
        starved = [second for second, run in enumerate(runs) if run.late and not run.late.uses_up(self.timeout)]
        if not starved:
            return list(runs)
        before = await self._pace()
        if any(run.late and run.late.waited is None for run in runs):
            before.require_usable(f"the tests took longer than {self.timeout:g} s")
        if before.free:
            return list(runs)
        repeated, limit = list(runs), self.timeout * min(before.stretch, USABLE)
        for second in starved:
            fresh = self.open_fresh()
            try:
                repeated[second] = await self._run(fresh, artifacts, allow, plan, bool(second), limit)
            finally:
                await fresh.close()
        if any(run.late and not run.late.is_enough(self.timeout) for run in repeated):
            what = f"the tests took longer than {limit:g} s"
            before.require_usable(what)
            (await self._pace()).require_usable(what, before.stretch * MARGIN)
        return repeated

    async def _pace(self) -> Pace:
        fresh = self.open_fresh()
        try:
            return await pace(await fresh.sandbox(), fresh.cpus)
        finally:
            await fresh.close()

    async def _report(
        self, sandbox: Sandbox, *, ended: list[str], args: list[str], expected: list[str], timeout: float
    ) -> _Run:
        secret = secrets.token_hex(16)
        # Half of the tests fail: explaining it is slow, and none may end the run. The plugin behind --stepwise is left
        # out under its second name: without the first, a suite's own settings would have an unknown option.
        args = ["--tb=line", "--assert=plain", *args, "--maxfail=0", "-p", "no:stepwiseplugin"]
        settings = {"secret": secret, "ended": ended, "args": args, "expected": expected}
        program = pkgutil.get_data(__package__, "pytest_reporter.py") or b""
        program += f"\n\nreport(**{settings!r})\n".encode()
        done = await sandbox.exec(f"{self.python} -", timeout=timeout, stdin=program, fresh=True, max_output=_OUTPUT)
        output = done.stderr.decode(errors="replace")
        output += f"\nthe tests took longer than {timeout:g} s" if done.timed_out else ""
        late = OwnTime(done.duration, done.waited) if done.timed_out else None
        return _Run(await in_own_thread(_reported, done.stdout, secret), output, late)

    async def _try_pytest(self) -> None:
        """Whether pytest works without anything of the agent's, nor of the suite, which may need that."""
        fresh = self.open_fresh()
        try:
            sandbox = await fresh.sandbox()
            for path, given in self.tests.items():  # pytest itself may be among them
                await sandbox.write_bytes(await fresh.path(path), await _content(given))
            folder = f"{sandbox.home}/lachesis-trial"
            await sandbox.write_bytes(f"{folder}/pytest.ini", b"[pytest]\n")
            await sandbox.write_bytes(f"{folder}/test_trial.py", _TRIAL.encode())
            args, expected = (
                ["-c", f"{folder}/pytest.ini", f"--rootdir={folder}", folder],
                ["test_trial.py::test_trial"],
            )
            limit = self.timeout * USABLE
            run = await self._report(sandbox, ended=[], args=args, expected=expected, timeout=limit)
        finally:
            await fresh.close()
        if run.late and not run.late.is_enough(self.timeout):
            (await self._pace()).require_usable(f"pytest without tests took longer than {limit:g} s")
        if "passed" not in run.outcomes.values():
            last = next((line for line in reversed(run.output.splitlines()) if line.strip()), "it printed nothing")
            raise RewardError(
                f"judge_pytest: {self.python!r} cannot run pytest in a fresh sandbox: {last}. Next step: install "
                "pytest in the image, or name a Python that has it, as `python`"
            )


async def _content(given: str | bytes | Path) -> bytes:
    data = await in_own_thread(given.read_bytes) if isinstance(given, Path) else given
    return data.encode() if isinstance(data, str) else data


async def _write_all(fresh: ToolSession, files: Mapping[str, bytes]) -> None:
    """Write files into a verifier, those of a folder in the workspace by one transfer: a suite may have hundreds."""
    sandbox = await fresh.sandbox()
    folders: dict[str, dict[str, bytes]] = {}
    for path, data in files.items():
        inside = await fresh.path(path)
        top, _, rest = posixpath.relpath(inside, sandbox.workdir).partition("/")
        if top == ".." or not rest:
            await _write(sandbox, inside, data)
        else:
            folders.setdefault(posixpath.join(sandbox.workdir, top), {})[rest] = data
    for inside, below in folders.items():
        with tempfile.TemporaryDirectory(prefix="tests-", dir=await in_own_thread(own_folder)) as name:
            local = Path(name, "folder")  # with the mode of a folder that others may read
            await in_own_thread(_write_local, local, below)
            await placed(
                sandbox,
                functools.partial(sandbox.upload_dir, local, inside),
                functools.partial(members, local, inside),
            )


async def _write(sandbox: Sandbox, inside: str, data: bytes) -> None:
    await placed(sandbox, lambda: sandbox.write_bytes(inside, data), lambda: [("f", inside)])


def _write_local(folder: Path, files: Mapping[str, bytes]) -> None:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(0o644)


class _Plan:
    """Which tests are changed in the first run of a round, and how; all others are in the second."""

    def __init__(
        self,
        files: dict[str, TestFile | bytes],
        expect: Sequence[str],
        choose: random.Random,
        conftests: Iterable[bytes] = (),
        other: bytes = b"",
    ) -> None:
        self._files = files
        self.changes: dict[str, Change] = {}
        """By id; tests of one function share theirs."""
        self.first: set[str] = set()
        self._place: dict[str, str] = {}
        """By id, the path of the file that has the test's text."""
        functions: dict[Any, list[Any]] = {}
        for id in expect:
            file, function = found_test(files, id)
            name = id.partition("[")[0].rpartition("::")[2].encode()
            if function is None and name not in file.source and b"class " not in file.source:  # it is not inherited
                raise RewardError(
                    f"judge_pytest: {file.path!r} has no test of the expected id {id!r}. Next step: correct `expect`"
                )
            self._place[id] = file.path
            functions.setdefault((function and (file.path, function.lineno)) or id, [file, function]).append(id)
        fixtures = functools.cache(functools.partial(_fixtures, files, [*conftests]))
        for file, function, *ids in functions.values():
            shared = function is not None and any(
                other.uses(function.name) for other in files.values() if isinstance(other, TestFile)
            )
            change = file.change(function, ids, _steady(file, function, other), shared=shared, fixtures=fixtures)
            self.changes.update(dict.fromkeys(ids, change))
            if choose.random() < 0.5:
                self.first.update(ids)

    def names(self, id: str, changed: bool) -> str:
        """The id that pytest has for a test."""
        return self.changes[id].renamed.get(id, id) if changed else id

    def files(self, second: bool) -> dict[str, bytes]:
        """The files of a run."""
        made = {}
        for path, file in self._files.items():
            if isinstance(file, bytes):
                made[path] = file
                continue
            changes = {
                id(change): change
                for test, change in self.changes.items()
                if self._place[test] == path and (test in self.first) is not second
            }
            made[path] = file.changed(changes.values())
        return made


@functools.cache
def _secret() -> bytes:
    """The key of all processes of this user that grade at the same time. Who grades alone makes a new one."""
    file = os.open(cache_folder() / "judge.key", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)  # and stays open
    key = b""
    while len(key) != 32:  # else who made the file was killed before it had written
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(file, secrets.token_bytes(32), 0)
        fcntl.flock(file, fcntl.LOCK_SH)  # nobody changes the key as long as this process lives
        key = os.pread(file, 32, 0)
    return key


def _fixtures(files: Mapping[str, TestFile | bytes], conftests: Iterable[bytes]) -> Fixtures:
    """Those of all files: a class may inherit from one of another file, and a module may be imported for them."""
    trees, unread = [file.tree for file in files.values() if isinstance(file, TestFile)], False
    for path, data in [*files.items(), *(("conftest.py", data) for data in conftests)]:
        if isinstance(data, bytes) and path.endswith(".py") and (b"fixture" in data or path.endswith("conftest.py")):
            try:
                trees.append(parse(data))
            except (SyntaxError, ValueError):  # it may be for another Python
                unread = True
    return Fixtures.of(trees, unread=unread)


def _steady(file: TestFile, function: Found, other: bytes = b"") -> random.Random:
    """What a test is changed to is the same in all gradings that can meet, and nobody inside can compute it.

    Code of several gradings can talk, for sandboxes of one machine have a kernel in common. If it saw several changes
    of a test, it would know the text that comes again for the right one.
    """
    text = b"" if function is None else file.text(function)
    return random.Random(hashlib.blake2b(text, key=_secret(), salt=other).digest())


_GOOD: tuple[Collection[str], Collection[str]] = (("passed",), ("failed", "error"))
"""Outcomes of a test as it is, and changed, with a right solution."""


def _worst(outcomes: Sequence[str], good: Collection[str]) -> str:
    """The outcome of several rounds: the first that a right solution would not have, preferring a pass."""
    bad = [outcome for outcome in outcomes if outcome not in good]
    for suspect in ("contradictory", "passed"):
        if suspect in bad:
            return suspect
    return (bad or list(outcomes))[0]


def _reported(output: bytes, secret: str) -> dict[str, str]:
    """The outcomes that a run has reported in lines that begin with `secret`."""
    records = []
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(secret + " "):
            with contextlib.suppress(ValueError, RecursionError):  # code under test can write here
                records.append(json.loads(line[len(secret) :]))
    return _outcomes(record for record in records if isinstance(record, dict))


def _outcomes(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """The outcome of every test that the records are about."""
    phases: dict[str, dict[str, set[str]]] = {}
    for record in records:
        if all(isinstance(record.get(key), str) for key in ("id", "when", "outcome")):
            outcome = "xfailed" if record.get("xfail") else record["outcome"]
            phase = "part" if record.get("part") else record["when"]  # of a test with parts, its failures count
            if phase != "part" or outcome == "failed":
                phases.setdefault(record["id"], {}).setdefault(phase, set()).add(outcome)
    return {id: _outcome(found) for id, found in phases.items()}


def _outcome(phases: Mapping[str, set[str]]) -> str:
    everything = set().union(*phases.values())
    if any({"passed", "failed"} <= outcomes for outcomes in phases.values()):
        return "contradictory"
    if "failed" in everything:
        return "failed" if "failed" in {*phases.get("call", ()), *phases.get("part", ())} else "error"
    for outcome in ("xfailed", "skipped"):
        if outcome in everything:
            return outcome
    done = all(phases.get(when) == {"passed"} for when in ("setup", "call", "teardown"))
    return "passed" if done else "missing"
