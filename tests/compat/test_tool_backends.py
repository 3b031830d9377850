"""The tool backends of the removed stack, with real pools."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import signal
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backends import BackendError, SettingsError
from lachesis_compat.tool_backends.engines import ModalSandboxConfig, ModalToolBackend, create_tool_backend
from lachesis_compat.tool_backends.pool import PoolToolBackend, ToolBackend
from lachesis_pools.places import published
from tests.support.modal_server import ModalServer
from tests.support.pool_engine import workers


@pytest.fixture
async def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolToolBackend]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = PoolToolBackend("--slots 3")
    await made.start()
    yield made
    await made.stop(purge=True)
    assert published() == {} and workers("run-") == []


def test_the_names_are_where_they_were() -> None:
    import atropos.backends as old  # type: ignore[import-not-found]

    names = (
        "ToolBackend",
        "NomadToolBackend",
        "SlotPool",
        "NomadClient",
        "SandboxExecutor",
        "ModalToolBackend",
        "Slot",
    )
    assert all(isinstance(getattr(old, name), type) for name in names) and callable(old.create_tool_backend)
    assert not hasattr(old, "Nothing")


async def test_results_come_in_the_order_of_the_requests_and_slots_run_at_once(backend: PoolToolBackend) -> None:
    protocol: ToolBackend = backend
    assert protocol.default_timeout_s == 30.0
    slots = await asyncio.gather(*(backend.acquire(f"trajectory-{number}") for number in range(3)))
    assert len({slot.slot_id for slot in slots}) == 3 and slots[1].trajectory_id == "trajectory-1"
    begin = asyncio.get_running_loop().time()
    results = await backend.execute_batch(
        [(slot, "bash", {"command": f"sleep {2 - number}; echo {number}"}) for number, slot in enumerate(slots)]
        + [(slots[0], "write_file", {"path": "a/b.txt", "content": 'it\'s "here"'})]
        + [(slots[0], "read_file", {"path": "a/b.txt"}), (slots[1], "read_file", {"path": "a/b.txt"})]
        + [(slots[2], "bash", {"command": "exit 3"}), (slots[2], "dance", {}), (slots[2], "bash", {})]
    )
    assert asyncio.get_running_loop().time() - begin < 6, "they do not wait for each other"
    assert [result.output for result in results[:3]] == ["0\n", "1\n", "2\n"]
    assert [result.slot_id for result in results[:3]] == [slot.slot_id for slot in slots]
    written, read, foreign, failed, unknown, incomplete = results[3:]
    assert written.success and read.output == 'it\'s "here"'
    assert not foreign.success and "No such file" in foreign.error
    assert (failed.success, failed.error, failed.metadata["returncode"]) == (False, "Exit code: 3", 3)
    assert unknown.error == "Unknown tool: dance" and not incomplete.success
    assert len({result.execution_id for result in results}) == len(results)


async def test_arguments_that_are_none_fail_their_own_call_only(backend: PoolToolBackend) -> None:
    slot = await backend.acquire()
    bad: list[tuple[str, Any]] = [
        ("bash", {"command": "true", "timeout": "ten"}),
        ("bash", {"command": "true", "timeout": [1]}),
        ("bash", "echo hi"),
        ("bash", None),
        ("write_file", {"path": "f", "content": "\ud800"}),
    ]
    results = await backend.execute_batch([*((slot, *each) for each in bad), (slot, "bash", {"command": "echo on"})])
    assert [result.success for result in results] == [False] * 5 + [True] and results[-1].output == "on\n"
    assert all(result.error for result in results[:-1])
    await backend.execute_batch([(slot, "bash", {"command": "echo abc > f"})])
    assert (await backend.read_artifact(slot, "f", max_bytes=-5))["content"] == "a"


async def test_one_shell_is_stateful_and_the_other_begins_anew(backend: PoolToolBackend) -> None:
    slot = await backend.acquire()
    [_, stayed, _, anew] = await backend.execute_batch(
        [
            (slot, "bash_stateful", {"command": "mkdir d; cd d; export A=1"}),
            (slot, "bash_stateful", {"command": "basename $PWD; echo $A"}),
            (slot, "bash", {"command": "cd d"}),
            (slot, "bash", {"command": "pwd"}),
        ]
    )
    assert stayed.output == "d\n1\n" and anew.output.strip() == slot.workspace_dir
    [late] = await backend.execute_batch([(slot, "bash", {"command": "sleep 20"})], timeout_s=1.0)
    assert late.error == "Command timed out after 1s" and not late.success


async def test_what_is_released_is_gone(backend: PoolToolBackend) -> None:
    slot = await backend.acquire("one")
    await backend.execute_batch([(slot, "bash", {"command": "echo mine > file; (sleep 500 &)"})])
    await backend.release(slot)
    other = await backend.acquire("two")
    [seen] = await backend.execute_batch([(other, "bash", {"command": "ls; pgrep sleep"})])
    assert seen.output == ""


async def test_artifacts_are_read_listed_and_packed(backend: PoolToolBackend) -> None:
    slot = await backend.acquire()
    command = "mkdir -p out/sub; printf '\\377\\0x' > out/data; touch out/sub/f"
    await backend.execute_batch([(slot, "bash", {"command": command})])
    read = await backend.read_artifact(slot, "out/data", encoding="base64", include_sha256=True)
    assert base64.b64decode(read["content"]) == b"\xff\0x" and not read["truncated"]
    assert read["sha256"] == hashlib.sha256(b"\xff\0x").hexdigest()
    assert (await backend.read_artifact(slot, "out/data", max_bytes=2))["truncated"]
    listed = await backend.list_artifacts(slot, "out")
    assert [(each["path"], each["is_dir"]) for each in listed["entries"]] == [("data", False), ("sub", True)]
    assert listed["entries"][0]["size_bytes"] == 3
    deep = await backend.list_artifacts(slot, "out", recursive=True, max_entries=2)
    assert [each["path"] for each in deep["entries"]] == ["data", "sub"] and deep["truncated"]
    packed = await backend.archive_artifacts(slot, "out")
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed["content"]))) as archive:
        assert {member.name for member in archive} == {".", "./data", "./sub", "./sub/f"}
    for missing in (
        await backend.read_artifact(slot, "no"),
        await backend.list_artifacts(slot, "no"),
        await backend.archive_artifacts(slot, "no"),
        await backend.archive_artifacts(slot, "out", archive_format="rar"),
        await backend.archive_artifacts(slot, "out", max_bytes=1),
    ):
        assert missing["success"] is False and missing["error"]


async def test_a_lost_sandbox_is_told_from_what_the_agent_did(backend: PoolToolBackend) -> None:
    slot = await backend.acquire()
    call = asyncio.create_task(backend.execute_batch([(slot, "bash", {"command": "sleep 30"})]))
    await asyncio.sleep(0.3)
    [name] = published()
    for pid in workers(f"{name}-"):
        os.kill(pid, signal.SIGKILL)
    [result] = await call
    assert not result.success and result.metadata["lost"]


async def test_a_pool_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with pytest.raises(BackendError, match="has ended"):
        await PoolToolBackend("--engine nothing").start()


@pytest.mark.slow
async def test_profiles_at_modal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    (tmp_path / "profiles.yaml").write_text(
        "profiles:\n  cpu: {cpu: 1.0, slots_per_sandbox: 2}\n"
        "  gpu: {gpu: A10G, slots_per_sandbox: 1, env_vars: {A: secret}}\n"
    )
    with ModalServer(tmp_path / "modal") as server:
        monkeypatch.setenv("MODAL_SERVER_URL", server.url)
        monkeypatch.setenv("MODAL_TOKEN_ID", server.credentials[0])
        monkeypatch.setenv("MODAL_TOKEN_SECRET", server.credentials[1])
        backend = ModalToolBackend.with_profiles(
            "training", default_profile="cpu", profiles_file=str(tmp_path / "profiles.yaml"), allow_network=False
        )
        assert backend.list_profiles() == ["cpu", "gpu"]
        slots = await asyncio.gather(
            *(backend.acquire(str(number), profile) for number, profile in enumerate(["cpu", "gpu", "", "cpu"]))
        )
        results = await backend.execute_batch([(slot, "bash", {"command": "echo $$"}) for slot in slots])
        assert all(result.success for result in results)
        variables = await backend.execute_batch([(slot, "bash", {"command": "echo $A"}) for slot in slots[:2]])
        assert [each.output for each in variables] == ["\n", "secret\n"]
        [name] = published()
        for pid in workers(name):
            assert b"secret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        kinds = {box.name: box.definition.resources.gpu_config.gpu_type for box in server.boxes.values()}
        assert [kinds[slot.sandbox.id] for slot in slots] == ["", "A10G", "", ""]
        assert len({slot.slot_id for slot in slots}) == 4
        await backend.stop()
        assert all(box.result is not None for box in server.boxes.values())
        assert server.unbuilt == set()
    with pytest.raises(SettingsError, match="no profile 'tpu', but cpu, gpu"):
        ModalToolBackend.with_profiles(default_profile="tpu", profiles_file=str(tmp_path / "profiles.yaml"))


def test_settings_are_read_from_old_configs_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATROPOS_MODAL_PROFILES", "gpu")
    monkeypatch.setenv("ATROPOS_MODAL_IMAGE", "python:3.12")
    monkeypatch.setenv("ATROPOS_MODAL_PROFILE_GPU_GPU", "T4")
    monkeypatch.setenv("ATROPOS_MODAL_PROFILE_GPU_CPU", "4")
    profiles = ModalSandboxConfig.load_profiles()
    assert {*profiles} == {"gpu", "default"} and profiles["default"].gpu is None
    assert (profiles["gpu"].gpu, profiles["gpu"].cpu, profiles["gpu"].image) == ("T4", 4.0, "python:3.12")
    backend = create_tool_backend(SimpleNamespace(tool_pool_mode="modal", modal_cpu=2.0, modal_env_vars="A=1;B=2"))
    assert isinstance(backend, ModalToolBackend)
    assert (backend.config.cpu, backend.config.env_vars) == (2.0, {"A": "1", "B": "2"})
    with pytest.raises(ValueError, match="nomad or modal, not 'default'"):
        create_tool_backend(SimpleNamespace(tool_pool_mode="default"))
