"""Files of the old import paths; see `lachesis.old_paths`."""
