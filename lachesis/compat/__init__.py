"""Everything that exists for code of the removed Hermes stack only; `lachesis.old_paths` finds it."""
