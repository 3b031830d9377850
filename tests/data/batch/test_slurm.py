"""The recipe for Slurm in `docs/batch.md`, on a Slurm of one node that is started here. Debian: slurm-wlm, munge."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.batch_runs import entries, thinks, write_rows
from tests.support.small_envs import ROOT, served

MISSING = [program for program in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(program) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: apt-get install slurm-wlm munge"),
    pytest.mark.skipif("LACHESIS_NEED_SLURM" not in os.environ, reason="`make test-slurm` asks for it"),
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as root only"),
]
# Without systemd and without cgroups: nothing of the plugin is used, but 22.05 does not start without one.
CGROUP = "CgroupPlugin=cgroup/v1\n"
SETTINGS = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
NodeName={host} NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The variables with which its commands find it."""
    folder = tmp_path / "slurm"
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, host=host, ports=ports))
    (folder / "cgroup.conf").write_text(CGROUP)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    names = {"key": "key", "socket": "munge.socket", "pid": "munge.pid", "log": "munge.log", "seed": "seed"}
    files = [f"--{kind}{'' if kind == 'socket' else '-file'}={folder / name}" for kind, name in names.items()]
    programs = []
    try:
        for command in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], ["slurmd", "-D"]):
            with (folder / f"{command[0]}.out").open("wb") as log:
                programs.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
            while command[0] == "munged" and not (folder / "munge.socket").exists():
                assert programs[0].poll() is None, (folder / "munged.out").read_text()
                time.sleep(0.05)
        yield variables
    finally:
        for program in reversed(programs):
            program.terminate()
            program.wait()


def test_an_array_of_jobs_plays_the_shards(tmp_path: Path, slurm: dict[str, str]) -> None:
    page = (ROOT / "docs/batch.md").read_text()
    (recipe,) = (part.partition("```")[0] for part in page.split("```sh\n") if part.startswith("sbatch"))
    rows = [{"prompt": f"prompt {number}"} for number in range(30)]
    write_rows(tmp_path / "prompts.jsonl", rows)
    with served(thinks) as server:
        more = "--model scripted --api_key x --env.enabled_toolsets []"
        for text, instead in (("16", "3"), ("--model NAME", more), ("http://server:8000/v1", server.base_url)):
            assert text in recipe
            recipe = recipe.replace(text, instead)
        path = f"{Path(sys.executable).parent}:{slurm['PATH']}"
        ended = subprocess.run(
            ["sh", "-ec", recipe],
            cwd=tmp_path,
            env={**slurm, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
    said = "".join(path.read_text(errors="replace") for path in tmp_path.glob("slurm*/*.out"))
    said += "".join(path.read_text() for path in tmp_path.glob("slurm-*.out"))
    assert ended.returncode == 0, ended.stdout + ended.stderr + said
    assert "3 shards: 30 kept, 0 discarded, 0 failed" in ended.stdout
    prompts = Counter(entry["conversations"][1]["value"] for entry in entries(tmp_path / "data/big/merged"))
    assert prompts == Counter(row["prompt"] for row in rows)
