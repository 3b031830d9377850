"""`lachesis engine`: train and sample a small model on this machine, with the SDK of Tinker as its client."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from backends.errors import SettingsError, cannot_listen
from backends.lazy import quiet_imports
from backends.tasks import stop_event
from lachesis.cli import port_number
from lachesis.cli.verb_parser import VerbParser
from lachesis_tokens.prompts.model_folders import MADE, model_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; the exit code."""
    arguments = _parser().parse_args(argv)
    if arguments.model not in MADE:
        model_folder(arguments.model)  # a wrong name is an error at once, not after the imports
    try:
        with quiet_imports():
            import peft  # noqa: F401
            import tinker  # noqa: F401
            import torch
    except ImportError as error:
        raise SettingsError(f'the engine needs {error.name}; pip install "lachesis-rl[torch]"') from None
    if arguments.full_finetuning and (arguments.dtype != "float32" or arguments.lora_layers):
        raise SettingsError("--full-finetuning trains all layers, in float32: leave out --dtype and --lora-layers")
    torch.set_num_threads(arguments.threads)
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        raise SettingsError(f"--device {arguments.device}: torch {torch.__version__} sees no GPU; use --device cpu")
    return asyncio.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> int:
    from lachesis_train.engine.model import Model
    from lachesis_train.engine.server import TrainingEngine, serve

    stopped = stop_event()
    if arguments.child:
        _end_with_stdin(stopped)
    folder = await asyncio.to_thread(model_folder, arguments.model)
    try:
        model = await asyncio.to_thread(Model, folder, dtype=arguments.dtype, device=arguments.device)
    except (OSError, ValueError) as error:  # as transformers says that files are missing, or of an unknown kind
        raise SettingsError(f"model {folder} cannot be loaded: {error}") from None
    engine = TrainingEngine(
        model,
        arguments.state_dir.absolute(),
        names=(arguments.model,),
        lora_layers=arguments.lora_layers,
        full_finetuning=arguments.full_finetuning,
    )
    async with contextlib.AsyncExitStack() as stack:
        try:
            base_url = await stack.enter_async_context(serve(engine, arguments.host, arguments.port))
        except OSError as error:
            raise cannot_listen(arguments.host, arguments.port, error) from None
        if arguments.child:
            print(json.dumps({"base_url": base_url}), flush=True)
        else:
            print(f"{base_url}\n  export TINKER_BASE_URL={base_url} TINKER_API_KEY=tml-local", flush=True)
        await stopped.wait()
    return 0


def _end_with_stdin(stopped: asyncio.Event) -> None:
    """The kernel closes stdin however the parent dies."""
    loop = asyncio.get_running_loop()

    def wait() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would be held when the interpreter ends
            pass
        loop.call_soon_threadsafe(stopped.set)

    threading.Thread(target=wait, daemon=True).start()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = VerbParser(prog="lachesis engine", description=__doc__)
    add = parser.add_argument
    add("--model", required=True, help="a model folder, or smollm2 or tiny, which are made on first use")
    add("--host", default="127.0.0.1")
    add("--port", type=port_number, default=8002, help="0 takes a free one (default: 8002)")
    add("--state-dir", type=Path, default=Path("data/engine"), help="where checkpoints are kept (default: data/engine)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the base model (default: float32)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--threads", type=_positive, default=1, help="threads of torch (default: 1)")
    add("--lora-layers", type=_positive, metavar="N", help="adapters in the last N layers only (default: all)")
    add("--full-finetuning", action="store_true", help="train all parameters instead of adapters; needs float32")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    return parser
