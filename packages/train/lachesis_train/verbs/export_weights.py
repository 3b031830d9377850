"""`lachesis export --run-dir DIR --to FOLDER|FILE.gguf`: write the trained model of a run as a model of its own.

A folder has safetensors, tokenizer and settings, as transformers and vLLM load them. A GGUF file is played by
`--openai.model_name FILE.gguf`.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from backends.errors import SettingsError
from lachesis_tokens.prompts.model_folders import model_folder, tokenizer_of
from lachesis_tokens.prompts.smollm2_file import smollm2_file
from lachesis_train.trainer.checkpoints import Checkpoint


def main(argv: Sequence[str] | None = None) -> int:
    """Write the model; the exit code."""
    given = _parser().parse_args(argv)
    found = Checkpoint.of_folder(given.run_dir)
    if not (given.run_dir / "engine").is_dir():
        raise SettingsError(
            f"{given.run_dir} has no folder engine: a service has the weights; load {found.state} there"
        )
    if given.to.exists():
        raise SettingsError(f"--to {given.to} exists; remove it, or choose another name")
    base = found.settings["base_model"]
    folder, is_gguf = model_folder(base), given.to.suffix == ".gguf"
    original = _original(given.gguf, base) if is_gguf else None
    try:
        import torch
        from transformers import AutoTokenizer

        from lachesis_train.engine.export import merged_model, write_gguf
    except ImportError as error:
        raise SettingsError(f'exporting needs {error.name}; pip install "lachesis-rl[torch]"') from None
    network = merged_model(folder, given.run_dir / "engine", found.state)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(base))
    part = given.to.with_name(f".{given.to.name}.part{os.getpid()}")
    given.to.parent.mkdir(parents=True, exist_ok=True)
    try:
        if original is not None:
            write_gguf(network, tokenizer, original, part, given.dtype)
        else:
            network.to(dtype=getattr(torch, given.dtype)).save_pretrained(part)
            tokenizer.save_pretrained(part)
        part.rename(given.to)
    finally:
        part.unlink(missing_ok=True) if part.is_file() else shutil.rmtree(part, ignore_errors=True)
    print(f"{given.to}: {base} with the weights of step {found.step} of {found.run_id}, {given.dtype}")
    return 0


def _original(given: Path | None, base: str) -> Path:
    """A GGUF file of the base model, for what a model folder does not say."""
    if given is None and base == "smollm2":
        return smollm2_file()
    if given is None or not given.is_file():
        raise SettingsError(
            f"a GGUF file takes vocabulary and metadata from one of the base model, {base}: name it with --gguf, or "
            "write a folder, and convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    return given


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lachesis export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, metavar="DIR", help="the folder of the training run")
    add("--to", type=Path, required=True, metavar="FOLDER|FILE.gguf", help="what to write; it must not exist")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the matrices (default: float32, which changes nothing)",
    )
    add("--gguf", type=Path, metavar="FILE", help="a GGUF file of the base model (default: that of smollm2)")
    return parser
