"""How much the embedded engine computes at once: what its memory grows with. Reading it imports no torch."""

from __future__ import annotations

from typing import Final

MICRO_BATCH_TOKENS: Final = 2048
"""Tokens, padding included, of one forward pass. Activations grow with it."""
LOGITS_AT_ONCE: Final = 1 << 25
"""Logits that are held at once; more positions are computed in parts, whose logits are computed again backwards."""
BATCH_TOKENS: Final = 1 << 16
"""Largest product of sampled rows and their longest possible length: bounds the memory of the KV cache."""
