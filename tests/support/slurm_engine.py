"""A Slurm of one node, with a key, ports and folders of its own. Debian: slurm-wlm, munge."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

MISSING = [program for program in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(program) is None]
NEEDS_SLURM = [
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
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
SlurmdParameters=config_overrides
NodeName={host} NodeAddr=127.0.0.1 CPUs={processors}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def slurm_engine(folder: Path, *, processors: int = 2) -> Iterator[dict[str, str]]:
    """The variables with which its commands find it. `processors` may be more than there are."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, host=host, ports=ports, processors=processors))
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
