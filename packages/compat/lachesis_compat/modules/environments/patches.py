"""Nothing has to be patched here."""


def apply_patches() -> None:
    """Does nothing."""
