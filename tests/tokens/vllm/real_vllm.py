"""A real vLLM for the tests, and a forward pass through the same weights to hold its logprobs against."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from lachesis_client.client_settings import ServerSettings

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".venv-vllm"
FOLDER = HOME / "models" / "SmolLM2-135M-Instruct"
SCRIPT = (sys.executable, str(ROOT / "scripts" / "vllm_cpu.py"))
CONTEXT = 2048
"""Tokens that the server takes, prompt and answer together."""
END_OF_TURN = 2
ROUNDING = 1e-3
"""Nats. Both sides compute in float32 with kernels of their own; a wrong position or temperature is off by tenths."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between reported logprobs and those of the forward pass, in nats."""

    tokens: int
    largest: float
    mean: float

    def __str__(self) -> str:
        return f"{self.tokens} tokens, largest difference {self.largest:.6f}, mean {self.mean:.6f}"


@dataclass(frozen=True, slots=True)
class RealVLLM:
    """A server that answers at `base_url`."""

    base_url: str

    def settings(self, **more: Any) -> ServerSettings:
        """For an engine."""
        return ServerSettings(**{"base_url": self.base_url, "model_name": FOLDER.name, **more})

    async def counter(self, name: str) -> float:
        """One of the server's own figures, summed over its labels."""
        url = self.base_url.removesuffix("/v1") + "/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            found = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", await answer.text(), re.MULTILINE)
        assert found, f"the server counts no {name}"
        return sum(map(float, found))


class OneVLLM:
    """At most one vLLM at a time, which is what a small machine has room for."""

    def __init__(self) -> None:
        self._flags: tuple[str, ...] = ()
        self._process: subprocess.Popen[str] | None = None
        self._server: RealVLLM | None = None

    def prepare(self) -> None:
        """Install and convert what is missing."""
        subprocess.run([*SCRIPT, "convert"], check=True)

    def running(self, *flags: str) -> RealVLLM:
        """The server with these flags: the one that runs, or a new one in its place.

        It computes in float32, so that differences are errors and not rounding.
        """
        if self._server is None or self._flags != flags:
            self.stop()
            with socket.create_server(("127.0.0.1", 0)) as listener:
                port = listener.getsockname()[1]
            command = [*SCRIPT, "serve", "--port", str(port), "--", "--dtype", "float32", *flags]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self._flags = flags
            self._await_ready()
            self._server = RealVLLM(f"http://127.0.0.1:{port}/v1")
        return self._server

    def stop(self) -> None:
        """End it. Safe to call at any time."""
        process, self._process, self._server = self._process, None, None
        if process is not None:
            process.terminate()
            process.communicate()

    def _await_ready(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        said = ""
        while not said.startswith("ready"):
            said = self._process.stdout.readline()
            assert said, "vLLM did not start; its log is .venv-vllm/vllm.log"
            print(said, end="", flush=True)


def forward_pass(
    samples: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float = 1.0, *, model: Path = FOLDER
) -> list[list[float]]:
    """Logprobs of the ids after each prompt, by transformers in float32."""
    listed = [{"prompt": [*prompt], "ids": [*ids], "temperature": temperature} for prompt, ids in samples]
    done = subprocess.run(
        [str(HOME / "bin" / "python"), "-P", str(Path(__file__).with_name("forward_pass.py"))],
        input=json.dumps({"model": str(model), "dtype": "float32", "samples": listed}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads(done.stdout)["logprobs"]
    return found


def difference(reported: Sequence[Sequence[float]], computed: Sequence[Sequence[float]]) -> Difference:
    """Of all tokens, one by one."""
    gaps = [
        abs(a - b) for left, right in zip(reported, computed, strict=True) for a, b in zip(left, right, strict=True)
    ]
    assert gaps, "nothing was sampled"
    return Difference(len(gaps), max(gaps), sum(gaps) / len(gaps))
