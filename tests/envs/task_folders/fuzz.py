"""Random task.toml files: mostly well-formed, with values that are right, wrong, deprecated or of another type."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from random import Random
from typing import Any

from lachesis_envs.task_folders.writing import _table

WORDS = [
    "a",
    "x y",
    "",
    "1G",
    "512M",
    "1.5g",
    "0K",
    "yes",
    "linux",
    "Windows",
    "main",
    "db",
    "public",
    "10.0.0.0/8",
    "é",
]
ODD = [
    None, True, False, 0, 1, -3, 2.0, 2.5, 1e300, float("inf"), float("nan"), "12", "1e2", "true", [], {}, ["a"],
    [1, "b"], {"a": 1}, [{"name": "x"}], datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, 3, 4), 10**25,
]  # fmt: skip
HOSTS = [
    "example.com", "*.example.com", "Example.COM.", "*.1.2.3.4", "1.2.3.4", "10.0.0.0/8", "10.0.0.1/8", "::1",
    "2001:db8::/32", "fe80::1%eth0", "[::1]", "http://x.y", "x.y:80", "a_b.c", "-a.b", "a-.b", "*", "*.", "", " a.b ",
    "a..b", "é.com", "x" * 64 + ".com", "2001:DB8::1", "1.2.3", "x/y",
]  # fmt: skip
NAMES = [
    "a",
    "b",
    "A",
    "é",
    "e\u0301",
    "..",
    "a/b",
    "con",
    "CON.txt",
    "nul",
    "a.",
    "a ",
    " ",
    "x" * 256,
    "a:b",
    "step 1",
]
SIZES = ["1G", "512M", "2048K", "1.5G", " 2g ", "1", "x", "G", "-1G", "infG", "1e400G", 1024, 2.5]
PATHS = [
    "/logs/artifacts", "/a/b", "a", "../a", "a/../b", "manifest.json", "manifest.json/", "/", ".", "", "C:/x", "a\\b",
    "x/manifest.json", "./manifest.json", "//a",
]  # fmt: skip
Make = Callable[[Random], Any]


def one(*values: Any) -> Make:
    return lambda random: random.choice(values)


def number(random: Random) -> Any:
    return random.choice([0, 1, 60, 900.0, 0.5, -1, "30", float("inf"), float("nan")])


def texts(random: Random) -> Any:
    return {random.choice("ABC"): random.choice(["1", "${HOME}", "${X:-y}", ""]) for _ in range(random.randrange(3))}


def many(make: Make, most: int = 3) -> Make:
    return lambda random: [make(random) for _ in range(random.randrange(most))]


def table(fields: dict[str, Make], needed: tuple[str, ...] = (), chance: float = 0.35) -> Make:
    def make(random: Random) -> Any:
        found = {}
        for name, value in fields.items():
            if random.random() < (0.97 if name in needed else chance):
                found[name] = random.choice(ODD) if random.random() < 0.02 else value(random)
        if random.random() < 0.02:
            found[random.choice(["unknown", "timeout_secs", "memory"])] = random.choice(ODD)
        return found

    return make


def rarely(make: Make, chance: float = 0.3) -> Make:
    return lambda random: make(random) if random.random() < chance else None


NETWORK: dict[str, Make] = {
    "network_mode": one("public", "no-network", "allowlist", "allowlist", "none"),
    "allowed_hosts": rarely(many(one(*HOSTS[:3], *HOSTS)), 0.4),
}
HEALTH: dict[str, Make] = {
    "command": one("true"), "interval_sec": number, "timeout_sec": number, "retries": one(1, 3, 2.0, "4", 2.5),
    "start_period_sec": number, "start_interval_sec": number,
}  # fmt: skip
MCP = table(
    {
        "name": one("m"), "transport": one("sse", "stdio", "http", "streamable-http", "ws"), "url": one("http://x", ""),
        "command": one("c", ""), "args": many(one("a")), "headers": rarely(texts, 0.2),
    },
    ("name", "url", "command"),
)  # fmt: skip
TPU = table({"type": one("v6e", ""), "topology": one("2x4", " 2x2x1 ", "2", "0x1")}, ("type", "topology"))
ENVIRONMENT = table(
    {
        **NETWORK,
        "build_timeout_sec": number, "docker_image": one("ubuntu:24.04", ""), "os": one("linux", "Windows", "mac"),
        "cpus": one(1, 2.0, 0.5, "2", float("nan")), "memory_mb": one(1024, 1024.0, "512", 0.5),
        "storage_mb": one(10240),
        "gpus": one(0, 1), "gpu_types": many(one("H100")), "env": texts, "skills_dir": one("/skills"),
        "tpu": rarely(TPU), "mcp_servers": rarely(many(MCP), 0.2), "workdir": one("/app"),
        "healthcheck": rarely(table(HEALTH, ("command",))),
        "memory": rarely(one(*SIZES)), "storage": rarely(one(*SIZES)),
        "allow_internet": rarely(one(True, False, "yes", 1, "maybe")),
    },
    chance=0.15,
)  # fmt: skip
AGENT = table({**NETWORK, "timeout_sec": number, "user": one("root", 1000, "1000", 1.5)}, chance=0.2)
COLLECT = table(
    {"command": one("c"), "service": one("main", "db", " x ", "a b", ""), "timeout_sec": number}, ("command",)
)
VERIFIER = table(
    {
        **NETWORK, "timeout_sec": number, "env": texts, "user": one("root", 0), "collect": rarely(many(COLLECT), 0.2),
        "environment_mode": one("shared", "separate", "separate", "x"), "environment": rarely(ENVIRONMENT, 0.3),
    },
    chance=0.2,
)  # fmt: skip
ARTIFACT_TABLE = table(
    {
        "source": one(*PATHS), "destination": one(*PATHS), "exclude": many(one("*.o")),
        "service": one("main", "db", "a b"),
    },
    ("source",),
)  # fmt: skip
ARTIFACTS = many(lambda random: random.choice(PATHS) if random.random() < 0.5 else ARTIFACT_TABLE(random))
STEP = table(
    {
        "name": one(*NAMES[:5], *NAMES), "agent": AGENT, "verifier": VERIFIER,
        "min_reward": one(0.5, 1, "0.5", {"reward": 1}, {"a": "x"}), "artifacts": rarely(ARTIFACTS, 0.2),
        "healthcheck": rarely(table(HEALTH, ("command",)), 0.2),
    },
    ("name",),
)  # fmt: skip
TASK = table(
    {
        "schema_version": one("1.4", "1.0", "2.0", 1), "version": one("1.0", "1.1", 1.0), "source": one("hub"),
        "artifacts": rarely(ARTIFACTS, 0.5), "multi_step_reward_strategy": one("mean", "final", "max"),
        "task": rarely(table({
            "name": one("org/name", "org/na.me", "a", "a/b/c", "a/..b", "-a/b"), "version": one("1", ""),
            "description": one(*WORDS), "authors": many(table({"name": one("A"), "email": one("e")}, ("name",))),
            "keywords": many(one(*WORDS)),
        }, ("name",))),
        "metadata": table({"a": one(*ODD), "b": one(*WORDS), "lachesis": one({"judge": {"kind": "pytest"}})}),
        "agent": AGENT, "verifier": VERIFIER, "environment": ENVIRONMENT, "solution": rarely(table({"env": texts})),
        "steps": rarely(many(STEP, 4), 0.5),
    },
    chance=0.4,
)  # fmt: skip


def task_toml(seed: int) -> str:
    """The text of one file. One in ten has a few characters changed."""
    random = Random(seed)
    made = TASK(random)
    text = "\n".join(_table(made, "")) if isinstance(made, dict) else ""
    if random.random() < 0.1 and text:
        for _ in range(random.randrange(1, 4)):
            place = random.randrange(len(text))
            text = text[:place] + random.choice(["", '"', "=", "[", "\n", "#", "1", "é"]) + text[place + 1 :]
    return text
