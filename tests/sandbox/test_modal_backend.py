"""The Modal backend, against a fake of Modal's services that runs real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path

import modal
import pytest
from google.protobuf.json_format import MessageToDict
from grpclib import Status
from modal_proto import api_pb2
from sandbox_watch import output

from backends import BackendError, BackendUnavailable, SandboxLost, SandboxSpec, SupportsSnapshot
from backends.base import Backend
from backends.modal import ModalBackend, ModalSandbox
from backends.modal.exec_stream import RELAY
from backends.owner import this_owner
from tests.support.modal_boxes import Result
from tests.support.modal_server import Fault, ModalServer

SECRETS = {"hub": {"HUB_TOKEN": "hf-planted-secret", "HUB_USER": "somebody"}, "other": {"OTHER": "planted-other"}}


@pytest.fixture(scope="module")
def server(modal_server: ModalServer) -> ModalServer:
    modal_server.secrets = SECRETS
    return modal_server


@pytest.fixture(scope="module")
def client(modal_client: modal.Client) -> modal.Client:
    return modal_client


@pytest.fixture(autouse=True)
def without_faults(server: ModalServer) -> Iterator[None]:
    yield
    server.clear_faults()


@pytest.fixture
async def backend(client: modal.Client, server: ModalServer) -> AsyncIterator[ModalBackend]:
    before = set(server.running())
    backend = ModalBackend(client=client, start_timeout=60)
    yield backend
    await backend.reap(everyone=True)
    assert set(server.running()) <= before


@pytest.fixture
async def sandbox(backend: ModalBackend) -> AsyncIterator[ModalSandbox]:
    sandbox = await backend.create(SandboxSpec(labels={"run_id": "run-1", "task_id": "t-17"}))
    yield sandbox
    await sandbox.close()


async def eventually(true: Callable[[], bool], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        await asyncio.sleep(0.05)
    return true()


# --- what is sent ----------------------------------------------------------------------------------------------------


async def test_every_field_is_sent(client: modal.Client, server: ModalServer) -> None:
    backend = ModalBackend(
        client=client,
        app_name="fields",
        secrets={"hub": ["HUB_TOKEN"]},
        region=["us-east", "eu"],
        cloud="aws",
        image_setup=["apt-get install -y git"],
        cpu_request=0.5,
        memory_request=256 << 20,
    )
    labels = {"run_id": "run 1/ä", "task_id": "t-17"}
    spec = SandboxSpec(
        image="python:3.12-slim", workdir="/srv/task", cpus=1.5, memory_bytes=512 << 20, lifetime=600.5, labels=labels
    )
    sandbox = await backend.create(spec)
    try:
        request = server.created[-1]
        sent = MessageToDict(request.definition, preserving_proto_field_name=True)
        assert len(json.dumps(sent.pop("entrypoint_args"))) < 1 << 16
        assert sent == {
            "name": sandbox.id,
            "image_id": sent["image_id"],
            "resources": {"milli_cpu": 500, "milli_cpu_max": 1500, "memory_mb": 256, "memory_mb_max": 512}
            | {"gpu_config": sent["resources"]["gpu_config"]},
            "timeout_secs": 631,
            "workdir": "/srv/task",
            "cloud_provider_str": "aws",
            "scheduler_placement": {"regions": ["us-east", "eu"]},
            "network_access": {"network_access_type": "BLOCKED"},
            "secret_ids": ["st-hub"],
            "open_ports": {},
        }
        tags = {tag.tag_name: tag.tag_value for tag in request.tags}
        assert abs(float(tags.pop("created")) - time.time()) < 600
        assert tags.pop("run_id").startswith("run-1--.")
        assert tags == {"lachesis": "sandbox", "id": sandbox.id, "owner": this_owner(), "task_id": "t-17"}
        assert request.app_id == server.apps[("", "fields")]
        built = [list(asked.image.dockerfile_commands) for asked in server.image_requests[-2:]]
        assert built[0] == ["FROM python:3.12-slim"]
        assert built[1][1:] == ["RUN apt-get install -y git"]
        assert await output(sandbox, "pwd; echo $HUB_TOKEN ${HUB_USER-unset}") == "/srv/task\nhf-planted-secret unset"
        listed = await backend.sandboxes()
        assert [(info.id, info.task_id, info.detail) for info in listed] == [(sandbox.id, "t-17", sandbox.object_id)]
        assert await backend.reap(run_id="run 1/ä") == []
        assert [info.id for info in await backend.reap(run_id="run 1/ä", everyone=True)] == [sandbox.id]
        assert await backend.sandboxes() == []
    finally:
        await sandbox.close()


async def test_a_gpu_a_network_and_default_limits_are_sent(client: modal.Client, server: ModalServer) -> None:
    backend = ModalBackend(client=client, gpu="A10G:2")
    await (await backend.create(SandboxSpec())).close()
    limited = server.created[-1].definition.resources
    assert (limited.milli_cpu_max, limited.memory_mb_max) == (2000, 2048)
    assert (limited.milli_cpu, limited.memory_mb) == (125, 128), "what Modal reserves by itself: the rest costs money"
    sandbox = await backend.create(SandboxSpec(network=True, cpus=0, memory_bytes=0, pids=0, disk_bytes=0))
    definition = server.created[-1].definition
    assert (definition.resources.gpu_config.gpu_type, definition.resources.gpu_config.count) == ("A10G", 2)
    assert definition.resources.milli_cpu_max == definition.resources.memory_mb_max == 0
    assert definition.network_access.network_access_type == api_pb2.NetworkAccess.OPEN
    assert await output(sandbox, "echo runs") == "runs"
    await sandbox.close()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (SandboxSpec(pids=100), "pids"),
        (SandboxSpec(disk_bytes=1 << 30), "disk_bytes"),
        (SandboxSpec(lifetime=25 * 3600), "lifetime"),
        (SandboxSpec(memory_bytes=1000), "memory_bytes"),
    ],
)
async def test_what_modal_cannot_enforce_is_refused(
    backend: ModalBackend, server: ModalServer, spec: SandboxSpec, field: str
) -> None:
    before = len(server.created)
    with pytest.raises(BackendUnavailable, match=rf"cannot enforce (a )?{field}.* Next step: "):
        await backend.create(spec)
    assert len(server.created) == before


# --- credentials and images ------------------------------------------------------------------------------------------


async def test_check_asks_and_creates_nothing(server: ModalServer, client: modal.Client) -> None:
    server.calls.clear()
    backend: Backend = ModalBackend(client=client, app_name="never-made")
    availability = await backend.check()
    assert availability.ok
    assert modal.__version__ in availability.detail
    assert set(server.calls) == {"ClientHello"}
    assert await backend.sandboxes() == []
    assert ("", "never-made") not in server.apps


async def test_refused_credentials_are_said_with_the_next_step(server: ModalServer) -> None:
    client = await server.client(("ak-wrong", "as-wrong-and-secret"))
    backend = ModalBackend(client=client)
    availability = await backend.check()
    assert (availability.ok, "modal token new" in availability.fix) == (False, True)
    with pytest.raises(BackendUnavailable, match="Next step: run `modal token new`") as error:
        await backend.create(SandboxSpec())
    assert "as-wrong-and-secret" not in f"{availability}{error.value}{error.value.__cause__}{backend!r}"
    await client.close.aio()


def test_missing_credentials_are_said_with_the_next_step(tmp_path: Path) -> None:
    code = "import asyncio; from backends import create_backend as c; print(asyncio.run(c('modal').check()))"
    code = code.replace("from backends import create_backend as c", "from backends.modal import ModalBackend as c")
    code = code.replace("c('modal')", "c()") + "; import sys; print('modal.client' in sys.modules)"
    home = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    for env, asked in ((home, False), ({**home, "MODAL_CONFIG_PATH": str(tmp_path / "none.toml")}, True)):
        command = [sys.executable, "-c", code]
        run = partial(
            subprocess.run, env=env, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2]
        )
        said, imported = run(command).stdout.splitlines()
        assert "ok=False, detail='Token missing" in said and "MODAL_TOKEN_ID" in said
        assert imported == str(asked), "the SDK is asked only where it may find a token"


async def test_images_that_cannot_be_used_are_named(backend: ModalBackend, server: ModalServer) -> None:
    with pytest.raises(BackendUnavailable, match=r"the image 'no-such:1' cannot be used: .*manifest unknown"):
        await backend.create(SandboxSpec(image="no-such:1"))
    with pytest.raises(BackendUnavailable, match=r"the image 'im-nothing' cannot be used: .*not found"):
        await backend.create(SandboxSpec(image="im-nothing"))
    with pytest.raises(BackendError, match=r"its image has no python3\. Next step: .*`add_python`"):
        await backend.create(SandboxSpec(image="no-python:1"))
    assert server.running() == []


# --- failures of Modal's ---------------------------------------------------------------------------------------------


async def test_closing_again_after_a_failure_tries_again(server: ModalServer, backend: ModalBackend) -> None:
    sandbox = await backend.create(SandboxSpec())
    server.add(Fault("SandboxTerminateV2", Status.INVALID_ARGUMENT))
    with pytest.raises(BackendError, match="could not be terminated"):
        await sandbox.close()
    assert sandbox.id in server.running()
    await sandbox.close()
    assert sandbox.id not in server.running()


async def test_failures_that_pass_end_in_one_sandbox(client: modal.Client, server: ModalServer) -> None:
    server.add(Fault("AppGetOrCreate", Status.UNAVAILABLE, times=2))
    server.add(Fault("SandboxCreateV2", Status.UNAVAILABLE, times=4))  # the SDK gives up after so many
    server.add(Fault("SandboxCreateV2", Status.RESOURCE_EXHAUSTED))
    advice = [api_pb2.RPCRetryPolicy(retry_after_secs=0.1)]
    server.add(Fault("SandboxCreateV2", Status.RESOURCE_EXHAUSTED, details=advice))
    server.add(Fault("SandboxCreateV2", Status.UNAVAILABLE, carried_out=True))
    server.add(Fault("SandboxTerminateV2", Status.UNAVAILABLE, times=5))
    sandbox = await ModalBackend(client=client, app_name="failing").create(SandboxSpec())
    assert server.running() == [sandbox.id]
    assert await output(sandbox, "echo runs") == "runs"
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0.1)
    closing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await closing
    assert server.running() == [], "closing goes on when it is cancelled"
    assert server.clear_faults() == [], "all were met"
    await sandbox.close()


async def test_no_more_are_created_at_once_than_allowed(client: modal.Client, server: ModalServer) -> None:
    backend = ModalBackend(client=client, concurrency=1)
    server.calls.clear()
    server.most_at_once.clear()
    server.add(Fault("SandboxCreateV2", stall=0.4, times=2))
    creating = [asyncio.create_task(backend.create(SandboxSpec())) for _ in range(2)]
    await asyncio.gather(*(sandbox.close() for sandbox in await asyncio.gather(*creating)))
    assert (server.calls["SandboxCreateV2"], server.most_at_once["SandboxCreateV2"]) == (2, 1)


async def test_a_cancelled_create_leaves_nothing(backend: ModalBackend, server: ModalServer) -> None:
    server.add(Fault("TaskExecStart", stall=60.0))
    task = asyncio.create_task(backend.create(SandboxSpec()))
    assert await eventually(lambda: len(server.running()) == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert server.running() == []


async def test_a_cut_of_the_line_is_not_noticed_by_a_command(sandbox: ModalSandbox, server: ModalServer) -> None:
    running = asyncio.create_task(sandbox.exec("echo x >> count; sleep 1; seq 100000", timeout=30))
    await asyncio.sleep(0.3)
    server.cut(1.5)
    result = await running
    assert (result.exit_code, result.stdout) == (0, "".join(f"{i}\n" for i in range(1, 100_001)).encode())
    assert await output(sandbox, "cat count") == "x"


async def test_a_lost_relay_is_replaced_and_every_command_runs_once(sandbox: ModalSandbox, server: ModalServer) -> None:
    data = os.urandom(2_000_000)

    async def disturb() -> None:
        for _ in range(3):
            await asyncio.sleep(0.25)
            while await asyncio.to_thread(server.kill_execs, sandbox.id) < 1:  # noqa: ASYNC110 - the next is on its way
                await asyncio.sleep(0.02)

    async def work(i: int) -> None:
        result = await sandbox.exec(f"echo {i} >> count; sleep 0.3; cat", timeout=30, stdin=data, max_output=len(data))
        assert (result.exit_code, result.stdout) == (0, data)
        await sandbox.write_bytes(f"file-{i}", data)
        assert await sandbox.read_bytes(f"file-{i}") == data

    await asyncio.gather(disturb(), *(work(i) for i in range(3)))
    assert await output(sandbox, "sort count") == "0\n1\n2"


async def test_a_sandbox_that_modal_ends_is_lost_with_the_reason(backend: ModalBackend, server: ModalServer) -> None:
    async def lost(status: Result.GenericStatus.ValueType, reason: str, exception: str = "") -> None:
        sandbox = await backend.create(SandboxSpec(lifetime=50, labels={"task_id": "t-17"}))
        running = asyncio.create_task(sandbox.exec("sleep 100", timeout=100))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(server.end, sandbox.id, status, exception)
        with pytest.raises(SandboxLost, match=f"task_id=t-17.*{reason}"):
            await running
        await sandbox.close()

    await asyncio.gather(
        lost(Result.GENERIC_STATUS_TERMINATED, "it was terminated at Modal"),
        lost(Result.GENERIC_STATUS_TIMEOUT, r"its lifetime of 50 s is over \(Modal's timeout\)"),
        lost(Result.GENERIC_STATUS_KERNEL_OOM_KILL, "Modal ended it with KERNEL_OOM_KILL: used 2 GiB", "used 2 GiB"),
        lost(Result.GENERIC_STATUS_INTERNAL_FAILURE, "Modal ended it with INTERNAL_FAILURE"),
    )


# --- powers, secrets, ownership --------------------------------------------------------------------------------------


async def test_a_snapshot_is_an_image_for_more_of_the_same(backend: ModalBackend, sandbox: ModalSandbox) -> None:
    assert isinstance(sandbox, SupportsSnapshot)
    await sandbox.exec("echo kept > note; rm /etc/group", timeout=20)
    image = await sandbox.snapshot()
    await sandbox.exec("echo later > note", timeout=20)
    another = await backend.create(SandboxSpec(image=image))
    assert await output(another, "cat note; test -e /etc/group || echo gone") == "kept\ngone"
    await another.close()


async def test_secrets_are_in_no_argument_no_log_and_no_other_place(
    client: modal.Client, server: ModalServer, caplog: pytest.LogCaptureFixture
) -> None:
    backend = ModalBackend(client=client, secrets={"hub": ["HUB_TOKEN"], "other": ["OTHER"]})
    started = len(server.created), len(server.executed)
    # Not the HTTP/2 library's: at that level it writes down every header of its protocol.
    with caplog.at_level(logging.DEBUG, "modal-client"), caplog.at_level(logging.DEBUG, "backends"):
        sandbox = await backend.create(SandboxSpec(env={"MINE": "planted-mine"}))
        assert await output(sandbox, "echo $HUB_TOKEN $OTHER $MINE") == "hf-planted-secret planted-other planted-mine"
        arguments = [*server.created[-1].definition.entrypoint_args]
        for request in server.executed[started[1] :]:
            arguments += [*request.command_args, str(request)]
        command_lines = b""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # a process that has ended meanwhile
                command_lines += path.read_bytes()
        everywhere = "".join([*arguments, str(server.created[-1]), caplog.text, repr(backend), repr(sandbox)])
        inside = await output(sandbox, "cat /proc/*/cmdline; ls -R / 2>/dev/null | head -c 0; env -i bash -c env")
        planted = ["hf-planted-secret", "planted-other", "planted-mine", *server.credentials[1:]]
        assert [secret for secret in planted if secret in everywhere + inside + command_lines.decode("latin-1")] == []
        assert server.credentials[1] not in await output(sandbox, "env; cat /proc/*/environ 2>/dev/null || true")
        # Neither the executor, which has the token, nor the relay can be looked into. (They are known by the socket.)
        look = """for line in $(grep -la [l]achesis /proc/[0-9]*/cmdline); do
            for file in environ mem maps fd/0; do (: < ${line%cmdline}$file) 2> /dev/null && echo open: $file; done
            echo found
        done"""
        async with asyncio.timeout(60):
            while (seen := await output(sandbox, look)).count("found") > 2:
                pass  # for a moment, what is about to be a shell looks like the executor
        assert seen == "found\nfound"
        await sandbox.close()
    with pytest.raises(BackendUnavailable, match="missing key"):
        await ModalBackend(client=client, secrets={"hub": ["NOT_THERE"]}).create(SandboxSpec())


_OWNER = """
import asyncio, sys
import modal
from modal_proto import api_pb2
from backends import SandboxSpec
from backends.modal import ModalBackend

async def main():
    client = modal.Client(sys.argv[1], api_pb2.CLIENT_TYPE_CLIENT, tuple(sys.stdin.readline().split()))
    await client.__aenter__()
    for grace in (60, 6):
        backend = ModalBackend(client=client, app_name="killed", grace=grace)
        sandbox = await backend.create(SandboxSpec(labels={"run_id": "r"}))
        await sandbox.start("sleep 1000")
        print(sandbox.id, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.slow
async def test_what_a_killed_owner_leaves_ends_or_is_reaped(server: ModalServer, client: modal.Client) -> None:
    backend = ModalBackend(client=client, app_name="killed")
    root = Path(__file__).parents[2]
    pipe = asyncio.subprocess.PIPE
    owner = await asyncio.create_subprocess_exec(
        *[sys.executable, "-c", _OWNER, server.url], cwd=root, stdin=pipe, stdout=pipe
    )
    try:
        assert owner.stdin is not None
        assert owner.stdout is not None
        owner.stdin.write(" ".join(server.credentials).encode() + b"\n")
        patient, impatient = [(await owner.stdout.readline()).decode().strip() for _ in range(2)]
        assert {(info.id, info.orphan) for info in await backend.sandboxes()} == {(patient, False), (impatient, False)}
        assert await backend.reap() == [], "its owner lives"
    finally:
        if owner.returncode is None:
            owner.kill()
            await owner.wait()
    assert await asyncio.to_thread(server.kill_execs, impatient) == 1, "its relay"
    assert await eventually(lambda: impatient not in server.running()), "its grace is over"
    assert await backend.reap(run_id="another") == []
    assert [(info.id, info.orphan) for info in await backend.reap(run_id="r")] == [(patient, True)]
    assert server.running() == []
    assert await backend.reap() == []


@pytest.mark.slow
def test_a_relay_whose_owner_says_nothing_ends() -> None:
    name = f"lachesis-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as executor:
        executor.bind("\0" + name)
        executor.listen()
        executor.settimeout(60)
        command = [sys.executable, "-I", "-S", "-c", RELAY, name, "5.0"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as relay:
            assert relay.stdin is not None
            assert relay.stdout is not None
            connection, _ = executor.accept()
            with connection:
                for _ in range(8):
                    relay.stdin.write(b"x")
                    relay.stdin.flush()
                    assert connection.recv(1) == b"x"
                    time.sleep(0.7)
                connection.sendall(b"answer")
                assert relay.stdout.read(6) == b"answer"
                assert relay.wait(60) == 0
                assert connection.recv(1) == b""
