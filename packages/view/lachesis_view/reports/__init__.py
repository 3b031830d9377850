"""Pages of finished runs, as files."""
