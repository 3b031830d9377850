"""Everything that exists for code of the removed Hermes stack only; `lachesis_compat.old_paths` finds it."""
