"""The same Dockerfile by an engine and by our player; images for singularity and ssh."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from sandbox_watch import opened, output

from backends import Backend, BackendUnavailable, SandboxSpec, create_backend
from backends.images import Build, image_for
from tests.support.docker_engine import FULL_IMAGE, DockerEngine
from tests.support.root_images import bare_root, full_root
from tests.support.singularity_engine import SingularityEngine
from tests.support.ssh_engine import SshEngine

DOCKERFILE = r"""# escape=\
ARG BASE
FROM ${BASE:-nothing}
ARG ONE=1 TWO
ARG PLAIN=default
ENV A=a B="b c" C=$ONE D=${TWO:-two} E='$A' F=\$A G=${A:+set}${NONE:+unset}
ENV LEGACY several  words of $A
ENV A=changed H=$A
WORKDIR /app
WORKDIR sub/$A
WORKDIR ../other
COPY . /all/
COPY a.txt /one
COPY a.txt /two/
COPY a.txt b.txt three/
COPY *.txt ./
COPY d /four
COPY d/ /four/five/
COPY d/e* /six/
COPY ["with space", "/seven/"]
COPY link /eight
COPY d /nine
COPY run.sh .
COPY run.sh /ten
COPY $ONE.txt /eleven${TWO:-x}
ADD x.tar.gz /twelve
ADD x.tar.gz a.txt /thirteen/
COPY x.tar.gz /fourteen
RUN mkdir -p /links /real && ln -s /real /links/abs && ln -s ../real /links/rel && echo old > /real/f && ln -s f /real/g
COPY a.txt /links/abs/
COPY a.txt /links/rel/renamed
COPY b.txt /real/g
COPY d/c.txt d/e/f.txt /links/abs/
RUN rm -r /four/five && mkdir /four/five && touch /four/five/new; rm /one; mv /six /moved \
  # a comment
  && echo $PLAIN $ONE "$B" '$A' > /said

RUN echo "$0 $A $C|$D|$E|$F|$G|$H|$LEGACY" > /variables; pwd >> /variables; umask >> /variables
SHELL ["/bin/bash", "-e", "-c"]
RUN [[ -d /moved ]] && echo $0 > /shell
RUN ["/bin/sh", "-c", "echo $A '$B' > /list"]
USER agent
RUN id -un > /tmp/who; id -gn >> /tmp/who; echo $HOME >> /tmp/who
USER root
WORKDIR /root/made
VOLUME /volume
RUN chmod 4755 /fourteen; mkdir -m 1777 /sticky; mkfifo /pipe; ln /two/a.txt /two/hard; \
  find /all /app /two /four /seven /eight /nine /ten /eleven* /twelve /thirteen /fourteen /links /real /moved \
  /said /variables /shell /list /tmp /root /volume /sticky /pipe /run /etc /opt /mnt /var \
  ! -path /etc/resolv.conf ! -path /etc/hosts ! -path /etc/hostname ! -path '/.lachesis*' ! -path /etc/mtab \
  ! -path /all/Dockerfile -printf '%p %y %m %l %s\n' | sed 's/ d \([0-9]*\) .*/ d \1/' | LC_ALL=C sort > /listing
RUN cd / && cat said variables shell list tmp/who two/a.txt eight ten real/* \
  app/sub/other/*.txt nine/*.txt > /texts
CMD ["x"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    folder = tmp_path / "context"
    for name in (
        "a.txt",
        "b.txt",
        "1.txt",
        "d/c.txt",
        "d/e/f.txt",
        "d/.hidden",
        "with space",
        "ignored/x",
        "kept/y.md",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"this is {name}\n")
    (folder / "run.sh").write_text("#!/bin/sh\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("d/c.txt")
    (folder / "d/inner").symlink_to("e/f.txt")
    (folder / "d/away").symlink_to("/etc/passwd")
    (folder / ".dockerignore").write_text("ignored\n**/*.md\n!kept/y.md\n# no rule\nx.log\n")
    with tarfile.open(folder / "x.tar.gz", "w:gz") as tar:
        tar.add(folder / "d", "top")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


async def texts(backend: Backend, image: str) -> dict[str, str]:
    async with opened(backend, SandboxSpec(image=image)) as sandbox:
        return {name: (await sandbox.read_bytes(name)).decode() for name in ("/listing", "/texts", "/variables")}


@pytest.mark.long
async def test_an_engine_and_the_player_make_the_same(
    docker: DockerEngine, context: Path, cache: Path, roots: Path
) -> None:
    local, engine = create_backend("local"), create_backend("docker", **docker.options)
    build = Build(context, args={"BASE": FULL_IMAGE, "PLAIN": "given"})
    lines: list[str] = []
    theirs = await image_for(build, engine, tell=lines.append)
    ours = await image_for(build, local, bases={FULL_IMAGE: str(full_root(roots / "full"))})
    assert any("Step " in line for line in lines)
    assert theirs.image.startswith("lachesis-build:")
    expected, found = await texts(engine, theirs.image), await texts(local, ours.image)
    assert found["/variables"] == expected["/variables"]
    assert found["/listing"].splitlines() == expected["/listing"].splitlines()
    assert found["/texts"] == expected["/texts"]
    assert (ours.workdir, ours.user) == (theirs.workdir, theirs.user)
    assert ours.env == theirs.env


async def test_an_engine_names_the_step_that_failed(docker: DockerEngine, tmp_path: Path) -> None:
    engine = create_backend("docker", **docker.options)
    (tmp_path / "Dockerfile").write_text(f"FROM {FULL_IMAGE}\nRUN echo oh; exit 3\n")
    with pytest.raises(BackendUnavailable, match=r"RUN echo oh; exit 3.*Next step: .*\n(.*\n)*oh"):
        await image_for(Build(tmp_path), engine)
    (tmp_path / "Dockerfile").write_text(f"FROM {FULL_IMAGE}\nNONSENSE x\n")
    with pytest.raises(BackendUnavailable, match=r"unknown instruction.*Next step"):
        await image_for(Build(tmp_path), engine)
    with pytest.raises(BackendUnavailable, match="'no-such:image' is not on the engine"):
        await image_for("no-such:image", engine)
    assert (await image_for(FULL_IMAGE, engine)).image == FULL_IMAGE
    (tmp_path / "Dockerfile").write_text(f"FROM {FULL_IMAGE}\nENV A=1\n")
    pulling = create_backend("docker", **{**docker.options, "pull": "always"})
    built = await image_for(Build(tmp_path), pulling)
    async with opened(pulling, SandboxSpec(image=built.image)) as sandbox:
        assert await output(sandbox, "echo $A") == "1"


async def played(backend: Backend, folder: Path, root: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(
        "FROM full\nENV A=1\nWORKDIR /app\nRUN echo $A > made; chmod 700 /opt; ln -s a b\n"
    )
    lines: list[str] = []
    for _ in range(2):
        image = await image_for(Build(folder), backend, bases={"full": str(root)}, tell=lines.append)
        spec = SandboxSpec(image=image.image, env=image.env, workdir=image.workdir)
        async with opened(backend, spec) as sandbox:
            said = await output(sandbox, "pwd; cat made; echo $A; readlink b; rm made; echo x > new; ls /opt -d")
            assert said == "/app\n1\n1\na\n/opt"
    assert sum("bringing" in line for line in lines) == (backend.name == "ssh")


async def test_images_for_singularity(singularity: SingularityEngine, cache: Path, tmp_path: Path, roots: Path) -> None:
    backend = create_backend("singularity", **singularity.options)
    await played(backend, tmp_path / "context", bare_root(roots / "bare"))
    assert (await image_for("debian:12", backend)).image == "docker://debian:12"


async def test_images_are_brought_to_the_machine_of_ssh(
    ssh: SshEngine, cache: Path, tmp_path: Path, roots: Path
) -> None:
    await played(create_backend("ssh", **ssh.options), tmp_path / "context", bare_root(roots / "bare"))
