"""Token engines: servers that sample from token ids and report exactly what they sampled (Phase 2)."""
