"""Doors to the environments of other standards: one module each, and one name, `SCHEME:NAME`, for every command."""
