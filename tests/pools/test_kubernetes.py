"""Workers as pods of a Kubernetes whose pods are processes of this machine: real ones, and claimed warm ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends import BackendError, BackendUnavailable, SandboxLost, SandboxSpec, create_backend
from lachesis_pools.engines.engine import ENGINES, WorkerCommand
from lachesis_pools.engines.kubernetes import KubernetesEngine
from tests.support.kubernetes_server import Fault, KubernetesServer
from tests.support.pool_engine import PoolEngine, pool_engine, workers
from tests.support.ports import free_port

PAGE = Path(__file__).parents[2] / "docs/pools.md"
ROLE, CLAIMS = re.findall(r"^```yaml\n(apiVersion.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
BASE = "default-1a2b3c4d-7"
SLEEPS = "#!/bin/sh\nexec sleep 1000\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KubernetesServer]:
    """Its account may do what the docs say, and no more."""
    (folder := tmp_path / "cluster").mkdir()
    with KubernetesServer(folder) as started:
        started.create(ROLE)
        started.rules = started.nodes.of("roles")["lachesis-pool"]["rules"]
        yield started


Make = Callable[..., KubernetesEngine]


@pytest.fixture
async def make(server: KubernetesServer, tmp_path: Path) -> AsyncIterator[Make]:
    """An engine whose workers are this script."""
    made: list[KubernetesEngine] = []

    def engine(script: str = SLEEPS, **options: Any) -> KubernetesEngine:
        (path := tmp_path / f"worker{len(made)}.sh").write_text(script)
        path.chmod(0o755)
        given = {"image": "img:1", "python": str(path), "kubeconfig": server.kubeconfig(), **options}
        made.append(
            KubernetesEngine(WorkerCommand("http://127.0.0.1:1", "the-key", 2, options='{"a": "$(PATH) $$"}'), **given)
        )
        return made[-1]

    yield engine
    for each in made:
        await each.close()


async def until(true: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    return found


async def failed(engine: KubernetesEngine, *names: str) -> dict[str, str]:
    """What the engine says once the first of them has ended."""
    end = time.monotonic() + 20
    while not (found := await engine.ended(names)):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    return dict(found)


def claimed(server: KubernetesServer, name: str) -> str:
    """The pod of a claim; empty if it has none."""
    return str(server.nodes.of("sandboxclaims")[name].get("status", {}).get("sandbox", {}).get("name", ""))


def phase(server: KubernetesServer, name: str) -> str:
    return str(server.nodes.of("pods")[name]["status"]["phase"])


async def test_a_worker_is_a_pod_and_the_key_is_in_a_secret(server: KubernetesServer, make: Make) -> None:
    script = '#!/bin/sh\necho "key $LACHESIS_POOL_TOKEN, arguments $*"\nexec sleep 1000\n'
    tolerations = [{"key": "gpu", "operator": "Exists"}]
    pod = {
        "metadata": {"labels": {"team": "rl"}},
        "spec": {
            "tolerations": tolerations,
            "containers": [{"name": "w", "volumeMounts": [{"name": "fuse", "mountPath": "/dev/fuse"}]}],
            "volumes": [{"name": "fuse", "hostPath": {"path": "/dev/fuse"}}],
        },
    }
    engine = make(script, cpu=2, memory="4Gi", gpu="1", runtime_class="gvisor", pod=pod)
    assert await engine.start(BASE, 2) == ""
    secret, body, other = server.bodies
    assert secret["metadata"]["name"] == BASE and secret["stringData"] == {"token": "the-key"}
    assert {body["metadata"]["name"], other["metadata"]["name"]} == {f"{BASE}.1", f"{BASE}.2"}
    ours = {"app.kubernetes.io/name": "lachesis-pool-worker", "lachesis.dev/pool-start": BASE}
    assert body["metadata"]["labels"] == {"team": "rl", **ours}
    spec = body["spec"]
    assert (spec["restartPolicy"], spec["runtimeClassName"], spec["tolerations"]) == ("Never", "gvisor", tolerations)
    [container] = spec["containers"]
    assert container["image"] == "img:1" and container["volumeMounts"]
    assert container["resources"]["limits"] == {"cpu": "2", "memory": "4Gi", "nvidia.com/gpu": "1"}
    assert "the-key" not in json.dumps([body, other])
    said = await until(lambda: server.nodes.log(f"{BASE}.2"))
    assert said.startswith("key the-key, arguments -m lachesis_pools worker") and f"--name {BASE}.2 " in said
    assert '{"a": "$(PATH) $$"}' in said, "Kubernetes takes such words for variables"
    assert await engine.ended([f"{BASE}.1", f"{BASE}.2"]) == {}
    await engine.stop([f"{BASE}.1", "default-1a2b3c4d-6.1"])
    await until(lambda: server.names("pods") == [f"{BASE}.2"])
    assert server.calls["delete secrets"] == 0, "a pod that starts late needs it"
    await engine.stop([f"{BASE}.2"])
    await engine.stop([f"{BASE}.2"])
    await until(lambda: not server.names("pods") + server.names("secrets"))


def test_a_template_is_read_from_a_file_and_decides_nothing_of_ours(tmp_path: Path) -> None:
    (path := tmp_path / "pod.yaml").write_text(
        "kind: Pod\nmetadata: {annotations: {a: b}}\nspec:\n  restartPolicy: Always\n  shareProcessNamespace: false\n"
        "  containers: [{name: w, image: of-the-file, args: [more]}, {name: proxy, image: p}]\n"
    )
    worker = WorkerCommand("http://127.0.0.1:1", "k", 2)
    body = KubernetesEngine(worker, pod=str(path))._body(f"{BASE}.1", BASE)
    assert body["spec"]["restartPolicy"] == "Never" and body["spec"]["shareProcessNamespace"] is False
    assert [each["image"] for each in body["spec"]["containers"]] == ["of-the-file", "p"]
    assert body["spec"]["containers"][0]["command"][:3] == ["python3", "-m", "lachesis_pools"]
    assert "args" not in body["spec"]["containers"][0]
    with pytest.raises(BackendError, match="image=IMAGE"):
        KubernetesEngine(worker)
    path.write_text("template: {spec: {}}")
    for wrong in (str(path), str(tmp_path / "none")):
        with pytest.raises(BackendError, match="template of a pod"):
            KubernetesEngine(worker, image="i", pod=wrong)


LOST = [
    Fault("create", "pods", carried_out=True),
    Fault("create", "secrets", carried_out=True),
    Fault("create", "pods"),
    Fault("create", "pods", 429, "TooManyRequests", times=3),
    Fault("create", "pods", 500),
    Fault("create", "pods", 504, "Timeout", carried_out=True),
    Fault("create", "pods", 409, "Conflict"),
]


@pytest.mark.parametrize("fault", LOST, ids=lambda each: f"{each.plural}-{each.code}-{each.carried_out}")
async def test_a_start_is_sent_again_and_makes_no_worker_twice(
    server: KubernetesServer, make: Make, fault: Fault
) -> None:
    engine = make()
    server.faults.append(Fault(**vars(fault)))
    await engine.start(BASE, 2)
    assert server.faults == [] and server.calls[f"create {fault.plural}"] > 1
    await until(lambda: [phase(server, f"{BASE}.{at}") for at in (1, 2)] == ["Running"] * 2)
    assert await engine.ended([f"{BASE}.1", f"{BASE}.2"]) == {}
    await engine.start(BASE, 2)  # once more: what is there is taken
    assert server.names("pods") == [f"{BASE}.1", f"{BASE}.2"] and server.names("secrets") == [BASE]


async def test_a_pod_of_somebody_else_is_not_taken(server: KubernetesServer, make: Make) -> None:
    engine = make()
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"{BASE}.1"}}
    server.create(json.dumps({**pod, "spec": {"containers": [{"name": "x", "image": "i", "command": ["true"]}]}}))
    with pytest.raises(BackendError, match=r"not ours.+Next step: kubectl delete"):
        await engine.start(BASE, 2)
    assert f"{BASE}.2" in server.names("pods"), "the pool stops it by its name"


async def test_what_is_refused_says_the_next_step(server: KubernetesServer, make: Make, tmp_path: Path) -> None:
    assert server.rules is not None
    server.rules = [rule for rule in server.rules if rule["resources"] != ["secrets"]]
    with pytest.raises(BackendError, match=r"cannot create resource.+Next step: give the account the Role"):
        await make().start(BASE, 1)
    for base in ("My_Pool-1a2b3c4d-7", "a..b-1-1", f"{'a' * 60}-1a2b3c4d-7"):
        with pytest.raises(BackendError, match="lachesis pool up --name"):
            await make().start(base, 1)
    with pytest.raises(BackendUnavailable, match="Next step: kubectl"):
        await make(kubeconfig=str(tmp_path / "none")).start(BASE, 1)
    with pytest.raises(BackendUnavailable, match="Next step: kubectl"):
        await make(context="another").start(BASE, 1)
    with pytest.raises(BackendError, match=r'the namespace "elsewhere"'):
        await make(namespace="elsewhere").start(BASE, 1)


async def test_the_client_is_an_extra(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ENGINES.load("kubernetes") is KubernetesEngine
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio.client", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'lachesis-rl\[kubernetes\]'"):
        await make().start(BASE, 1)


async def test_in_a_pod_the_service_account_is_used(
    server: KubernetesServer, make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kubernetes_asyncio import config

    def load(configuration: Any) -> None:
        configuration.host, configuration.api_key["BearerToken"] = server.url, f"Bearer {server.token}"

    (namespace := tmp_path / "namespace").write_text("rl\n")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(config, "load_incluster_config", load)
    monkeypatch.setattr("lachesis_pools.engines.kubernetes_api._HERE", namespace)
    await make(kubeconfig="").start(BASE, 1)
    assert server.names("pods") == [f"{BASE}.1"]


async def test_credentials_that_have_ended_are_read_again(server: KubernetesServer, make: Make) -> None:
    engine = make()
    await engine.start(BASE, 1)
    server.token = "another"
    with pytest.raises(BackendError, match=r"Unauthorized.+Next step: log in"):
        await engine.ended([f"{BASE}.1"])
    server.kubeconfig()
    with pytest.raises(BackendError, match="Unauthorized"):
        await engine.ended([f"{BASE}.1"])
    assert await engine.ended([f"{BASE}.1"]) == {}
    server.token = "a third"
    server.kubeconfig()
    await engine.stop([f"{BASE}.1"])
    await until(lambda: not server.names("pods"))


CRASH = "#!/bin/sh\necho warm\necho 'error: no user namespaces. Next step: x' >&2\nexit 3\n"


async def test_a_worker_that_ends_says_why_and_leaves_no_pod(server: KubernetesServer, make: Make) -> None:
    one, two = f"{BASE}.1", f"{BASE}.2"
    engine = make(CRASH)
    await engine.start(BASE, 1)
    assert await failed(engine, one) == {one: "exit code 3, Error: error: no user namespaces. Next step: x"}
    assert await engine.ended([]) == {}
    await until(lambda: not server.names("pods") + server.names("secrets"))
    server.nodes.placing = "image"
    engine = make()
    await engine.start(BASE, 1)
    assert await failed(engine, one) == {one: 'ImagePullBackOff: Back-off pulling image "img:1"'}
    await until(lambda: not server.names("pods"))  # it would be pulled later
    server.nodes.placing = ""
    await engine.start(BASE, 2)
    await until(lambda: [phase(server, each) for each in (one, two)] == ["Running"] * 2)
    server.run(server.nodes.evict(one))
    assert await failed(engine, one, two) == {one: "Evicted: The node was low on resource: memory."}
    server.run(server.nodes.drain(two))
    assert await failed(engine, one, two) == {one: "somebody has deleted it", two: "somebody has deleted it"}


async def test_a_worker_that_waits_for_a_node_has_not_ended(server: KubernetesServer, make: Make) -> None:
    engine, server.nodes.placing = make(), "room"
    await engine.start(BASE, 1)
    await until(lambda: server.nodes.of("pods")[f"{BASE}.1"]["status"].get("conditions"))
    assert await engine.ended([f"{BASE}.1"]) == {}
    assert phase(server, f"{BASE}.1") == "Pending"


async def test_a_pod_whose_secret_is_gone_has_ended(server: KubernetesServer, make: Make) -> None:
    engine = make()
    server.faults.append(Fault("create", "secrets", 409, "AlreadyExists"))  # and yet there is none
    await engine.start(BASE, 1)
    said = await failed(engine, f"{BASE}.1")
    assert said == {f"{BASE}.1": f'CreateContainerConfigError: secret "{BASE}" not found'}


@pytest.mark.parametrize("code", [0, 429, 503])
async def test_an_api_that_does_not_answer_is_asked_again_by_the_pool(
    server: KubernetesServer, make: Make, code: int
) -> None:
    engine = make()
    await engine.start(BASE, 1)
    server.faults.append(Fault("list", "pods", code, times=2 if code == 0 else 1))  # aiohttp repeats a GET once
    with pytest.raises(BackendError, match="Kubernetes: GET pods"):
        await engine.ended([f"{BASE}.1"])
    assert await engine.ended([f"{BASE}.1"]) == {}


async def test_what_an_earlier_process_started_is_ended_politely(
    server: KubernetesServer, make: Make, tmp_path: Path
) -> None:
    script = f"#!/bin/sh\ntrap 'sleep 0.3; echo drained >{tmp_path}/$$; exit' TERM\nwhile :; do sleep 0.02; done\n"
    await make(script).start(BASE, 2)
    await make(script).start(f"{BASE}1", 1)
    server.nodes.placing = "room"
    await make(script).start(f"{BASE[:-1]}9", 1)
    await until(lambda: phase(server, f"{BASE}.1") == phase(server, f"{BASE}.2") == "Running")
    await asyncio.sleep(0.1)
    later = make()
    server.faults.append(Fault("deletecollection", "pods", carried_out=True))
    for base in (BASE, f"{BASE[:-1]}9", "default-1a2b3c4d-5"):
        await later.reap(base, "")
    assert server.names("pods") == [f"{BASE}1.1"] and server.names("secrets") == [f"{BASE}1"]
    assert sorted(path.read_text() for path in tmp_path.glob("[0-9]*")) == ["drained\n"] * 2


def docs_claims(server: KubernetesServer, command: list[str], url: str = "", slots: int = 1) -> None:
    """Make what the docs have, with two warm pods of another command."""
    text = CLAIMS.replace("http://pool.rl:8765", url).replace('"16"', f'"{slots}"')
    if command:
        text = text.replace("command: [python3, -m, lachesis_pools, worker,", f"command: [{', '.join(command)},")
    server.create(text)


async def test_a_claim_gets_a_warm_pod_its_name(server: KubernetesServer, make: Make, tmp_path: Path) -> None:
    one, two = f"{BASE}.1", f"{BASE}.2"
    (script := tmp_path / "warm.sh").write_text(
        "#!/bin/sh\nuntil [ -s $2 ]; do sleep 0.02; done\necho I am $(cat $2), $LACHESIS_POOL_TOKEN\n"
        "trap 'sleep 0.3; exit' TERM\nwhile :; do sleep 0.02; done\n"
    )
    docs_claims(server, ["sh", str(script)])
    engine = make(claims="lachesis", image="")
    server.faults.append(Fault("create", "sandboxclaims", carried_out=True))
    await engine.start(BASE, 1)
    [claim] = server.bodies
    assert claim["spec"].keys() == {"warmPoolRef", "lifecycle", "additionalPodMetadata"}, "else it starts cold"
    assert server.names("sandboxclaims") == [one] and server.names("secrets") == ["lachesis-pool"]
    pod = await until(lambda: claimed(server, one))
    assert await until(lambda: server.nodes.log(pod)) == f"I am {one}, a-long-random-key\n"
    assert await engine.ended([one]) == {}
    assert len(server.names("pods")) == 3, "the warm pool is full again"
    await asyncio.to_thread(server.run, server.nodes.drain(pod))
    assert await engine.ended([one]) == {}, "its connection tells, as the claim is Ready"
    await make(claims="lachesis").reap(BASE, "")
    assert server.names("sandboxclaims") == [] and len(server.names("pods")) == 2, "its pod has ended as well"
    await engine.start(BASE, 2)
    pod = await until(lambda: claimed(server, two))
    await until(lambda: server.nodes.log(pod))
    server.run(server.nodes.kill(pod))
    assert await failed(engine, one, two) == {two: f"PodFailed: Pod has ended: I am {two}, a-long-random-key"}
    await until(lambda: server.names("sandboxclaims") == [one])


async def test_a_claim_that_never_gets_a_pod_has_ended(server: KubernetesServer, make: Make) -> None:
    engine = make(claims="none")
    await engine.start(BASE, 1)
    said = await failed(engine, f"{BASE}.1")
    assert said == {f"{BASE}.1": 'WarmPoolNotFound: SandboxWarmPool "none" not found'}
    await until(lambda: not server.names("sandboxclaims"))


# with a pool


async def joined(pool: PoolEngine, count: int = 1, without: str = "") -> list[str]:
    """The names of its workers once there are so many, and one is not among them."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {pool.place['token']}"}) as session:
        for _ in range(600):
            async with session.get(f"{pool.place['url']}/status") as answer:
                names = [each["name"] for each in (await answer.json())["workers"]]
            if len(names) == count and without not in names:
                return names
            await asyncio.sleep(0.05)
    raise AssertionError(f"{names}; {(pool.folder / 'log').read_text()[-2000:]}")


@asynccontextmanager
async def pool_of(
    server: KubernetesServer, folder: Path, *options: str, port: int = 0, **env: str
) -> AsyncIterator[PoolEngine]:
    given = [word for option in options for word in ("--engine-option", option)]
    arguments = ["--engine", "kubernetes", "--listen", f"127.0.0.1:{port}", "--slots", "1", "--least", "1", *given]
    with pool_engine(folder, *arguments, env={"KUBECONFIG": server.kubeconfig(), **env}) as pool:
        yield pool
        await asyncio.to_thread(pool.end)


@pytest.mark.slow
async def test_sandboxes_of_pods_are_lost_with_them_and_pods_with_their_pool(
    server: KubernetesServer, tmp_path: Path
) -> None:
    async with pool_of(server, tmp_path / "pool", "image=i") as pool:
        [first] = await joined(pool)
        assert server.names("pods") == [first]
        backend = create_backend("pool", **pool.options)
        sandbox = await backend.create(SandboxSpec())
        assert (await sandbox.exec("echo in a pod", timeout=20)).stdout == b"in a pod\n"
        running = asyncio.create_task(sandbox.exec("sleep 100", timeout=200))
        await asyncio.sleep(0.2)
        server.run(server.nodes.kill(first))
        with pytest.raises(SandboxLost):
            await running
        await sandbox.close()
        [second] = await joined(pool, without=first)
        # A node that is drained lets its worker end what runs.
        async with asyncio.timeout(30):
            sandbox = await backend.create(SandboxSpec())
            running = asyncio.create_task(sandbox.exec("sleep 1; echo whole", timeout=20))
            await asyncio.sleep(0.2)
            draining = asyncio.create_task(asyncio.to_thread(server.run, server.nodes.drain(second)))
            assert (await running).stdout == b"whole\n"
            await sandbox.close()
            await draining
        await joined(pool, without=second)
        os.kill(pool.process.pid, signal.SIGKILL)
        pool.process.wait()
        [left] = server.names("pods")
        assert workers(left)
        pool.start()
        await joined(pool, without=left)
        assert workers(left) == [] and len(server.names("pods")) == 1
    assert server.names("pods") == server.names("secrets") == [] and pool.workers() == set()


def catches_sigterm(pid: int) -> bool:
    [caught] = re.findall(r"SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())
    return bool(int(caught, 16) & 1 << signal.SIGTERM - 1)


async def test_sandboxes_of_claims_are_lost_with_their_node(server: KubernetesServer, tmp_path: Path) -> None:
    port = free_port()
    docs_claims(server, [], f"http://127.0.0.1:{port}")
    env = {"LACHESIS_POOL_TOKEN": "a-long-random-key"}
    async with pool_of(server, tmp_path / "pool", "claims=lachesis", port=port, **env) as pool:
        [first] = await joined(pool)
        sandbox = await create_backend("pool", **pool.options).create(SandboxSpec())
        running = asyncio.create_task(sandbox.exec("sleep 100", timeout=200))
        await asyncio.sleep(0.2)
        server.run(server.nodes.kill(claimed(server, first)))
        with pytest.raises(SandboxLost):
            await running
        await sandbox.close()
        await joined(pool, without=first)
        await until(lambda: first not in server.names("sandboxclaims"))
    assert server.names("sandboxclaims") == [] and pool.workers() == set()
    assert server.names("secrets") == ["lachesis-pool"], "what is not the pool's is left"
    one, two = server.names("pods")
    await until(lambda: catches_sigterm(server.nodes.pid(one)))
    server.run(server.nodes.removed("pods", one))
    assert server.nodes.exits[one] == 0 and two not in server.nodes.exits, "one that nobody has claimed ends as well"
