"""Files of the old import paths; see `lachesis_compat.old_paths`."""
