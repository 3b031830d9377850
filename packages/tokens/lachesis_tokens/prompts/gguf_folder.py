"""A GGUF file as a Hugging Face model folder: weights, tokenizer, generation settings and chat template.

Needs transformers, torch and gguf. `scripts/gguf_to_folder.py` is its command line, which vLLM's environment runs too.
"""

from __future__ import annotations

from pathlib import Path


def convert_gguf(gguf: Path, folder: Path, template: str | None = None, end_of_turn: str | None = None) -> int:
    """Write the folder, with weights dequantised to bfloat16; the number of parameters.

    `end_of_turn` replaces the end token of the file: some name the token that begins a message.
    """
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
        tokenizer.chat_template = template
    if end_of_turn is not None:
        tokenizer.eos_token = end_of_turn
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
    return int(model.num_parameters())
