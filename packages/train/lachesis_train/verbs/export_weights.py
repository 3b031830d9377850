"""`lachesis export --run-dir DIR --to FOLDER|FILE.gguf`: write the trained model of a run as a model of its own.

A folder has safetensors, tokenizer and settings, as transformers and vLLM load them. A GGUF file is run by
`--openai.model_name FILE.gguf`. With `--adapter` it has the adapter alone, for llama.cpp's `--lora`; one of SmolLM2 is
run like a whole model.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from backends.errors import SettingsError
from lachesis.cli.verb_parser import VerbParser
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
    if given.adapter and not is_gguf:
        raise SettingsError(f"--adapter writes a GGUF file, and --to {given.to} does not end in .gguf")
    original = _original(given.gguf, base) if is_gguf and not given.adapter else None
    try:
        import torch
        from transformers import AutoTokenizer

        from lachesis_train.engine.export import merged_model, write_gguf, write_gguf_adapter
    except ImportError as error:
        raise SettingsError(f'exporting needs {error.name}; pip install "lachesis-rl[torch]"') from None
    part = given.to.with_name(f".{given.to.name}.part{os.getpid()}")
    given.to.parent.mkdir(parents=True, exist_ok=True)
    weights = folder, given.run_dir / "engine", found.state
    try:
        if given.adapter:
            write_gguf_adapter(*weights, part, given.dtype)
        elif original is not None:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_of(base))
            write_gguf(merged_model(*weights, original), tokenizer, original, part, given.dtype)
        else:
            network, tokenizer = merged_model(*weights), AutoTokenizer.from_pretrained(tokenizer_of(base))
            network.to(dtype=getattr(torch, given.dtype)).save_pretrained(part)
            tokenizer.save_pretrained(part)
        part.rename(given.to)
    finally:
        part.unlink(missing_ok=True) if part.is_file() else shutil.rmtree(part, ignore_errors=True)
    what = f"adapter of {base}" if given.adapter else base
    print(f"{given.to}: {what} with the weights of step {found.step} of {found.run_id}, {given.dtype}")
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
    parser = VerbParser(prog="lachesis export", description=__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, metavar="DIR", help="the folder of the training run")
    add("--to", type=Path, required=True, metavar="FOLDER|FILE.gguf", help="what to write; it must not exist")
    add(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        default="float32",
        help="of the matrices (default: float32, which changes nothing)",
    )
    add("--adapter", action="store_true", help="write the adapter alone, to a GGUF file")
    add("--gguf", type=Path, metavar="FILE", help="a GGUF file of the base model (default: that of smollm2)")
    return parser
