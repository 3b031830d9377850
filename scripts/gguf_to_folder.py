"""Convert a GGUF file to a Hugging Face model folder, for vLLM, SGLang and trainers.

Needs transformers, torch and gguf; `scripts/vllm_cpu.py convert` runs it with the Python that has them.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = map(str, (ROOT, *(ROOT / "packages").iterdir()))  # that Python need not have the project installed
from lachesis_tokens.prompts.gguf_folder import convert_gguf  # noqa: E402
from lachesis_tokens.prompts.smollm2_file import smollm2_file  # noqa: E402


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf", help='a GGUF file, or "smollm2" for that of the embedded model')
    parser.add_argument("folder", type=Path)
    parser.add_argument("--template", type=Path, help="a chat template that replaces the file's")
    parser.add_argument("--end-of-turn", help="a token that replaces the file's end token")
    args = parser.parse_args()
    try:
        gguf = smollm2_file() if args.gguf == "smollm2" else Path(args.gguf).absolute()
    except FileNotFoundError as error:
        sys.exit(f"error: {error}")
    template = args.template.read_text(encoding="utf-8") if args.template else None
    count = convert_gguf(gguf, args.folder, template, args.end_of_turn)
    print(f"{args.folder}: {count / 1e6:.0f}M parameters")


if __name__ == "__main__":
    main()
