"""The cost of sandboxes: a command, a start, branches, 64 at once, memory, files, 100 MB of output; and `swe-rex`.

    python benchmarks/sandboxes.py [--backends local-bubblewrap,docker] [--parts exec,start] [--no-peer]

All figures are from one run on one machine, wall time, `median / p95`. A round measures every candidate once, in a new
order each time, so that other load hits all alike. The engines are private: a dockerd, an sshd, apptainer, and for
Modal the tests' fake server, whose figures show the cost of our half and nothing about Modal. A backend that
cannot run here is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backends import Backend, BackendUnavailable, Sandbox, SandboxSpec, SupportsCheckpoint, WarmSandboxes
from benchmarks.machine import disturbance, forget_peak, memory_mb
from benchmarks.sandbox_engines import VARIANTS, Variant, memory_of_others, supervised, variants
from benchmarks.swe_rex import PeerMissing, SweRex, installed, swe_rex

PARTS = ("exec", "start", "branches", "many", "files", "output")
SINGLE, BURST, PAUSE = 3, 5, 0.03
"""Commands of a candidate in a round: single ones, each after PAUSE seconds, like a model's; then some without a
pause. They differ, because between two commands a sandbox starts the shell for the next one."""
STARTS, TRANSFERS, OUTPUTS = 10, 3, 3
"""The number of rounds."""
FILE, CHUNK = 64_000_000, 250_000
FOLDERS, FILES, SMALL = 20, 100, 1_000
"""The copied folder: number of folders, files in each, bytes in each."""
OUTPUT = 100_000_000
PATIENCE = 300.0
LIMIT_MS, LIMITED = 2.0, ("local-bubblewrap", "local-none", "docker")
TARGET_RATIO = 1.5
LIMIT_OUTPUT_MB = 16.0

Burst = Callable[[int], Awaitable[list[float]]]
"""Runs a number of commands, and returns the seconds that each took."""


@dataclass
class Report:
    """The contents of the last line."""

    exec_ms: dict[str, float] = field(default_factory=dict)
    times_sh: dict[str, float] = field(default_factory=dict)
    exec_ms_without_pause: dict[str, float] = field(default_factory=dict)
    output_growth_mb: dict[str, float] = field(default_factory=dict)

    def missed(self) -> list[str]:
        missed = []
        for field_name, taken in (("exec_ms", self.exec_ms), ("exec_ms_without_pause", self.exec_ms_without_pause)):
            missed += [f"{field_name} of {name}" for name in LIMITED if taken.get(name, 0.0) > LIMIT_MS]
        grown = self.output_growth_mb
        return missed + [f"output_growth_mb of {name}" for name in grown if grown[name] > LIMIT_OUTPUT_MB]

    def line(self) -> str:
        rounded = {name: {key: round(value, 2) for key, value in of.items()} for name, of in vars(self).items()}
        limits = {"exec_ms": LIMIT_MS, "output_growth_mb": LIMIT_OUTPUT_MB}
        return json.dumps({**rounded, "target_times_sh": TARGET_RATIO, "limits": limits, "missed": self.missed()})


def middle(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def high(values: Sequence[float]) -> float:
    """The 95th percentile; of fewer than 20, the highest."""
    return sorted(values)[int(0.95 * len(values))]


def both(values: Sequence[float], scale: float = 1.0, digits: int = 0) -> str:
    return f"{scale * middle(values):.{digits}f} / {scale * high(values):.{digits}f}"


def row(label: str, *cells: str) -> None:
    print(f"  {label:<18}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def title(text: str, *heads: str) -> None:
    print(f"\n{text}")
    row("", *heads)


def noise() -> str:
    """The mean wall time of a fixed piece of work, as a multiple of its best."""
    slower = disturbance(time.perf_counter)
    return f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}; fixed work takes {slower:.2f} times its best"


async def run(sandbox: Sandbox, command: str = "true") -> float:
    started = time.perf_counter()
    result = await sandbox.exec(command, timeout=PATIENCE)
    seconds = time.perf_counter() - started
    if result.exit_code != 0:
        raise RuntimeError(f"{command!r} failed: {result}")
    return seconds


@asynccontextmanager
async def opened(backend: Backend, part: str) -> AsyncIterator[Sandbox]:
    sandbox = await backend.create(SandboxSpec(labels={"run_id": "benchmark", "task_id": part}))
    try:
        await run(sandbox)
        yield sandbox
    finally:
        await sandbox.close()


@asynccontextmanager
async def all_opened(made: Sequence[Variant], part: str) -> AsyncIterator[dict[str, Sandbox]]:
    async with AsyncExitStack() as stack:
        yield {variant.name: await stack.enter_async_context(opened(variant.backend, part)) for variant in made}


# A command


def plain(shell: str) -> Burst:
    """The code of a program that runs a command without a sandbox."""

    async def burst(times: int) -> list[float]:
        taken = []
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        for _ in range(times):
            started = time.perf_counter()
            process = await asyncio.create_subprocess_exec(
                shell, "-c", "true", stdin=null, stdout=pipe, stderr=pipe, env={"PATH": os.defpath}
            )
            await process.communicate()
            taken.append(time.perf_counter() - started)
        return taken

    return burst


def inside(sandbox: Sandbox) -> Burst:
    async def burst(times: int) -> list[float]:
        return [await run(sandbox) for _ in range(times)]

    return burst


async def exec_latency(made: Sequence[Variant], peer: SweRex | None, rounds: int, report: Report) -> None:
    async with all_opened(made, "exec") as sandboxes:
        candidates: dict[str, Burst] = {"sh -c": plain("sh"), "bash -c": plain("bash")}
        candidates |= {name: inside(sandbox) for name, sandbox in sandboxes.items()}
        if peer is not None:
            session = peer.run_in_session
            candidates |= {"swe-rex execute": peer.execute, "swe-rex session": lambda _: session(1)}
        single: dict[str, list[float]] = {name: [] for name in candidates}
        row_of: dict[str, list[float]] = {name: [] for name in candidates}
        for number in range(rounds + 1):
            for name in random.sample(sorted(candidates), len(candidates)):
                apart = []
                for _ in range(SINGLE):
                    await asyncio.sleep(PAUSE)
                    apart += await candidates[name](1)
                await asyncio.sleep(PAUSE)
                at_once = await candidates[name](BURST)
                if number:  # the first warms up
                    single[name] += apart
                    row_of[name] += at_once
    heads = ("a single one", "times sh", f"{BURST} without a pause", "times sh")
    title(f"exec of `true`, ms, {rounds} rounds", *heads)
    for name in candidates:
        ratios = [middle(of[name]) / middle(of["sh -c"]) for of in (single, row_of)]
        cells = [both(of[name], 1000, 2) for of in (single, row_of)]
        row(name, cells[0], f"{ratios[0]:.2f}", cells[1], f"{ratios[1]:.2f}")
        if name in sandboxes:
            report.exec_ms[name], report.times_sh[name] = 1000 * middle(single[name]), ratios[0]
            report.exec_ms_without_pause[name] = 1000 * middle(row_of[name])


# A start


async def cold_start(made: Sequence[Variant], peer: SweRex | None, rounds: int) -> None:
    async def start(backend: Backend) -> tuple[float, float]:
        started = time.perf_counter()
        async with opened(backend, "start"):
            ready = time.perf_counter()
        return ready - started, time.perf_counter() - ready

    candidates: dict[str, Callable[[], Awaitable[tuple[float, float]]]] = {
        variant.name: lambda backend=variant.backend: start(backend)  # type: ignore[misc]
        for variant in made
    }
    if peer is not None:
        candidates["swe-rex session"] = peer.cold_start
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for number in range(rounds + 1):
        for name in random.sample(sorted(candidates), len(candidates)):
            await asyncio.sleep(PAUSE)
            seconds = await candidates[name]()
            taken[name] += [seconds] if number else []
    title(f"cold start, ms, {rounds} rounds", "create and first exec", "close", "together")
    for name, pairs in taken.items():
        ready, closed = ([pair[at] for pair in pairs] for at in (0, 1))
        row(name, both(ready, 1000), both(closed, 1000), both([sum(pair) for pair in pairs], 1000))


# Branches


async def branches(made: Sequence[Variant], rounds: int) -> None:
    heads = ("create and first exec", "checkpoint", "child and first exec", "warm lease")
    title(f"a checkpoint of {FILES} files in {FILES * SMALL / 1e3:.0f} kB, ms, {rounds} rounds", *heads)
    for variant in made:
        taken: list[tuple[float, float, float, float]] = []
        warm = WarmSandboxes(variant.backend, 1)
        try:
            for _ in range(rounds):
                await asyncio.sleep(PAUSE)
                taken.append(await _branch(variant.backend, warm))
        except BackendUnavailable:
            row(variant.name, "none")
            continue
        finally:
            await warm.close()
        row(variant.name, *(both([one[at] for one in taken], 1000) for at in range(4)))


async def _branch(backend: Backend, warm: WarmSandboxes) -> tuple[float, float, float, float]:
    times = [time.perf_counter()]
    async with opened(backend, "branches") as parent:
        times.append(time.perf_counter())
        if not isinstance(parent, SupportsCheckpoint):
            raise BackendUnavailable("it makes no checkpoints")
        await run(parent, f"for i in $(seq {FILES}); do head -c {SMALL} /dev/zero > $i; done")
        begin = time.perf_counter()
        checkpoint = await parent.checkpoint()
        saved = time.perf_counter()
        child = await parent.fork(checkpoint)
        await run(child)
        forked = time.perf_counter()
        await child.close()
    lent = time.perf_counter()
    lease = await warm.lease(SandboxSpec())
    ready = time.perf_counter()
    await lease.release()
    return times[1] - times[0], saved - begin, forked - saved, ready - lent


# Many at once


async def many(made: Sequence[Variant], count: int) -> None:
    heads = ("s until all have run", "s until all are closed", "MB PSS each", "MB here each")
    title(f"{count} sandboxes at once", *heads)
    for variant in made:
        async with opened(variant.backend, "many"):
            pass
        await _many(variant, count)


async def _many(variant: Variant, count: int) -> None:
    gc.collect()
    before, here = _others(), memory_mb("VmRSS")
    spec = SandboxSpec(labels={"run_id": "benchmark", "task_id": "many"})
    sandboxes: list[Sandbox] = []

    async def one() -> None:
        sandbox = await variant.backend.create(spec)
        sandboxes.append(sandbox)
        await run(sandbox)

    try:
        started = time.perf_counter()
        results = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
        ready = time.perf_counter() - started
        await asyncio.sleep(1.0)
        after, grown = _others(), memory_mb("VmRSS") - here
    finally:
        started = time.perf_counter()
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        closed = time.perf_counter() - started
    for error in results:
        if error is not None:
            raise error
    each = "only root can see" if before is None or after is None else f"{(after - before) / count:.2f}"
    row(variant.name, f"{ready:.2f}", f"{closed:.2f}", each, f"{grown / count:.2f}")


def _others() -> float | None:
    try:
        return memory_of_others()
    except PermissionError:
        return None


# Files


async def files(made: Sequence[Variant], rounds: int) -> None:
    heads = ("write_chunks MB/s", "read_chunks MB/s", "upload_dir s", "download_dir s")
    taken: dict[str, list[tuple[float, ...]]] = {name: [] for name in ("a plain copy", *(of.name for of in made))}
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as name:
        folder = Path(name)
        for number in range(FOLDERS):
            (folder / "up" / str(number)).mkdir(parents=True)
            for at in range(FILES):
                (folder / "up" / str(number) / f"{at}.py").write_bytes(os.urandom(SMALL))
        async with all_opened(made, "files") as sandboxes:
            for number in range(rounds):
                for label in random.sample(sorted(taken), len(taken)):
                    await asyncio.sleep(PAUSE)
                    copy = folder / f"{label}-{number}"
                    if label in sandboxes:
                        taken[label].append(await _files(sandboxes[label], folder / "up", copy, number))
                    else:
                        taken[label].append(await asyncio.to_thread(_copied, folder / "up", copy))
    title(f"a file of {FILE / 1e6:.0f} MB, and a folder of {FOLDERS * FILES} files; {rounds} rounds", *heads)
    for label, measured in taken.items():
        columns = list(zip(*measured, strict=True))
        speeds = [f"{FILE / 1e6 / middle(of):.0f} / {FILE / 1e6 / high(of):.0f}" for of in columns[:2]]
        row(label, *speeds, *(both(of, digits=2) for of in columns[2:]))


def _copied(up: Path, down: Path) -> tuple[float, ...]:
    """The same with the file system of this machine."""
    chunk, large = os.urandom(CHUNK), down.with_suffix(".large")
    times = [time.perf_counter()]
    with large.open("wb") as file:
        for _ in range(FILE // CHUNK):
            file.write(chunk)
    times.append(time.perf_counter())
    with large.open("rb") as file:
        while file.read(CHUNK):
            pass
    times.append(time.perf_counter())
    large.unlink()
    begin = time.perf_counter()
    shutil.copytree(up, down)
    copied = time.perf_counter() - begin
    return times[1] - times[0], times[2] - times[1], copied, copied


async def _files(sandbox: Sandbox, up: Path, down: Path, number: int) -> tuple[float, ...]:
    chunk = os.urandom(CHUNK)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(FILE // CHUNK):
            yield chunk

    times = [time.perf_counter()]
    await sandbox.write_chunks("large", chunks())
    times.append(time.perf_counter())
    size = 0
    async for part in sandbox.read_chunks("large"):
        size += len(part)
    times.append(time.perf_counter())
    await sandbox.upload_dir(up, f"folder-{number}")
    times.append(time.perf_counter())
    await sandbox.download_dir(f"folder-{number}", down)
    times.append(time.perf_counter())
    copied = sum(1 for path in down.rglob("*") if path.is_file())
    if (size, copied) != (FILE, FOLDERS * FILES):
        raise RuntimeError(f"{size} bytes and {copied} files came back from {sandbox}")
    await run(sandbox, f"rm -rf folder-{number} large")
    return tuple(after - before for before, after in pairwise(times))


# Output


async def output(made: Sequence[Variant], rounds: int, report: Report) -> None:
    taken: Mapping[str, list[float]] = {variant.name: [] for variant in made}
    grown: Mapping[str, list[float]] = {variant.name: [] for variant in made}
    async with all_opened(made, "output") as sandboxes:
        for _ in range(rounds):
            for name in random.sample(list(sandboxes), len(sandboxes)):
                await asyncio.sleep(PAUSE)
                gc.collect()
                forget_peak()
                before = memory_mb("VmRSS")
                taken[name].append(await run(sandboxes[name], f"head -c {OUTPUT} /dev/zero"))
                grown[name].append(memory_mb("VmHWM") - before)
    title(f"{OUTPUT / 1e6:.0f} MB of output, {rounds} rounds", "s", "MB more here, at most")
    for name, seconds in taken.items():
        report.output_growth_mb[name] = max(grown[name])
        row(name, both(seconds, digits=2), f"{max(grown[name]):.1f}")


async def measure(given: argparse.Namespace, peer_python: str | None) -> list[str]:
    report = Report()
    task = asyncio.current_task()
    assert task is not None
    # Once: `timeout` sends the signal twice, and the second would cut short the cleanup that the first starts.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: task.cancelling() or task.cancel())
    print(noise())
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(variants(given.backends))
        peer = None if peer_python is None else await stack.enter_async_context(swe_rex(peer_python))
        if "exec" in given.parts:
            await exec_latency(made, peer, given.rounds, report)
        if "start" in given.parts:
            await cold_start(made, peer, STARTS)
        if "branches" in given.parts:
            await branches(made, STARTS)
        if "many" in given.parts:
            await many(made, given.at_once)
        if "files" in given.parts:
            await files(made, TRANSFERS)
        if "output" in given.parts:
            await output(made, OUTPUTS, report)
    print(f"\n{noise()}\n{report.line()}")
    return report.missed()


def chosen(of: Sequence[str]) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(of)):
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there is {', '.join(of)}")
        return names

    return words


def bench(given: argparse.Namespace) -> int:
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="lachesis-bench-") as folder:
        python = None if given.no_peer else given.peer_python
        if python is None and not given.no_peer and {"exec", "start"} & set(given.parts):
            try:
                python = installed(Path(folder))
            except PeerMissing as error:
                print(error)
        try:
            return bool(asyncio.run(measure(given, python)))
        except (KeyboardInterrupt, asyncio.CancelledError):
            return 130


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--backends", type=chosen(VARIANTS), default=VARIANTS, help=f"which of {','.join(VARIANTS)} (default: all)"
    )
    parser.add_argument("--parts", type=chosen(PARTS), default=PARTS, help=f"which of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of the part exec")
    parser.add_argument("--at-once", type=int, default=64, help="sandboxes at once")
    parser.add_argument("--no-peer", action="store_true", help="skip swe-rex")
    parser.add_argument("--peer-python", help="a Python that has swe-rex, instead of a new virtual environment")
    given = parser.parse_args()
    return supervised(lambda: bench(given))


if __name__ == "__main__":
    sys.exit(main())
