"""A Slurm on this machine, with a key, ports and folders of its own. Debian: slurm-wlm, munge."""

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
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
MpiDefault=none
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextlib.contextmanager
def slurm_engine(folder: Path, *, processors: int = 2, nodes: int = 1) -> Iterator[dict[str, str]]:
    """The variables with which its commands find it. `processors` of each node may be more than there are."""
    (folder / "state").mkdir(parents=True)
    ports = []
    for _ in range(1 + nodes):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    host = socket.gethostname().partition(".")[0]
    nodes_of = [f"node{number}" for number in range(1, nodes + 1)]
    described = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={processors}"
        for name, port in zip(nodes_of, ports[1:], strict=True)
    )
    (folder / "slurm.conf").write_text(SETTINGS.format(folder=folder, host=host, ports=ports, nodes=described))
    (folder / "cgroup.conf").write_text(CGROUP)
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    names = {"key": "key", "socket": "munge.socket", "pid": "munge.pid", "log": "munge.log", "seed": "seed"}
    files = [f"--{kind}{'' if kind == 'socket' else '-file'}={folder / name}" for kind, name in names.items()]
    programs = []
    try:
        daemons = [["slurmd", "-D", "-N", name] for name in nodes_of]
        for command in (["munged", "--foreground", "--force", *files], ["slurmctld", "-D"], *daemons):
            with (folder / f"{command[0]}.out").open("ab") as log:
                programs.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
            while command[0] == "munged" and not (folder / "munge.socket").exists():
                assert programs[0].poll() is None, (folder / "munged.out").read_text()
                time.sleep(0.05)
        yield variables
    finally:
        for program in reversed(programs):
            program.terminate()
            program.wait()
