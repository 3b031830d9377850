"""How much the embedded engine computes at once: what its memory grows with. Reading it imports no torch."""

from __future__ import annotations

from typing import Final

MICRO_BATCH_TOKENS: Final = 2048
"""Tokens, padding included, of one forward pass on a CPU. Activations grow with it."""
ACTIVATIONS_OF_A_GPU: Final = 0.25
"""The share of a GPU's memory that the activations of one forward pass may take. There a pass over few tokens takes as
long as one over many, so passes are as large as this allows."""
LOGITS_AT_ONCE: Final = 1 << 25
"""Logits that are held at once; more positions are computed in parts, whose logits are computed again backwards."""
BATCH_TOKENS: Final = 1 << 16
"""Largest product of sampled rows and their longest possible length: bounds the memory of the KV cache."""
KEPT_TOKENS: Final = 1 << 15
"""Tokens whose keys and values are kept after their request, for the next turns of their conversations."""
FULL_IN_MEMORY: Final = 2
"""Versions with full weights that stay in memory, each as large as the model."""
