"""The shards of a batch run as tasks of Ray, which are joined at the end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from backends.errors import LachesisError, SettingsError
from lachesis_data.batch.shards import merge_shards


def play_on_ray(address: str, shards: int, arguments: Sequence[str], run: Path) -> int:
    """Play `run` in so many shards and join them in `run/merged`; the exit code.

    Args:
        address: of a Ray cluster, as `ray.init` takes it: HOST:PORT, `auto`, or `local` for one of this machine's own.
        arguments: of `lachesis batch`, for each shard. Paths in them, and `run`, are on a file system that all machines
            have at the same place.

    Raises:
        SettingsError: the package ray is missing.
        LachesisError: the cluster cannot be reached, or the shards do not join.
    """
    try:
        import ray
    except ImportError as error:
        raise SettingsError(f'--ray needs the package ray ({error}); pip install "lachesis-rl[ray]"') from error
    try:
        ray.init(address)
    except Exception as error:  # each kind of address has its own
        raise LachesisError(f"--ray {address}: Ray cannot be reached ({error}); is it started there?") from error
    worst = 0
    try:
        parts = [f"{number}/{shards}" for number in range(1, shards + 1)]
        # A worker that is lost is started again, and the shard goes on where it was.
        play = ray.remote(_play).options(max_retries=3)
        tasks = [play.remote(str(Path.cwd()), [*arguments, "--shard", part]) for part in parts]
        for part, task in zip(parts, tasks, strict=True):
            try:
                code, said = ray.get(task), ""
            except ray.exceptions.RayError as error:
                code, said = 1, f": {error}"
            print(f"shard {part} ended with exit code {code}{said}", flush=True)
            worst = max(worst, code)
    finally:
        ray.shutdown()
    if worst > 1:  # not for samples that failed: no shard is whole
        return worst
    lines, complete = merge_shards(run, run / "merged")
    print("\n".join(lines))
    return worst or int(not complete)


def _play(folder: str, arguments: list[str]) -> int:
    """One shard, in a process that ends with the worker, as after Ctrl-C. Ray brings what it prints."""
    command = ["setpriv", "--pdeathsig", "TERM", sys.executable, "-m", "lachesis", "batch", *arguments]
    code = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False).returncode
    return code if code >= 0 else 128 - code
