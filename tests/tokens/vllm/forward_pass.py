"""Logprobs of given ids by a plain forward pass in transformers. Run by the Python that has torch, never imported.

One JSON object on stdin: `model` (folder), `dtype`, `samples` of `prompt` and `ids`, and optionally `temperature`.
One on stdout: `logprobs`, a list for each sample, natural logarithms.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    import torch  # type: ignore[import-not-found,unused-ignore]
    from transformers import AutoModelForCausalLM

    order: dict[str, Any] = json.load(sys.stdin)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype=order["dtype"]).eval()
    found: list[list[float]] = []
    with torch.inference_mode():
        for sample in order["samples"]:
            prompt, ids = sample["prompt"], sample["ids"]
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.float() / sample.get("temperature", 1.0), dim=-1)
            found.append(logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0].tolist())
    json.dump({"logprobs": found}, sys.stdout)


if __name__ == "__main__":
    main()
