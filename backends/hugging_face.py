"""The Hugging Face hub: whether it can be reached, before its library tries for half a minute."""

from __future__ import annotations

import re
from pathlib import Path


def why_offline() -> str:
    """Why the hub cannot be reached; empty where it can. Asks once, by the client of its library, which has its proxies
    and certificates. Blocks for up to 10 s."""
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=10)  # any answer will do
    except Exception as error:  # which types it raises depends on the client
        return f"{constants.ENDPOINT} cannot be reached: {error}"
    return ""


def dataset_problem(name: str) -> str:
    """Why a dataset of the hub cannot be loaded: it is not in the cache, and the hub is away; empty where it may be."""
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    # Both caches write the name of a dataset with signs of their own between its parts.
    folders = (*Path(config.HF_DATASETS_CACHE).glob("*"), *Path(HF_HUB_CACHE).glob("datasets--*"))
    kept = {_letters(folder.name.removeprefix("datasets--")) for folder in folders}
    if _letters(name) in kept or not (reason := why_offline()):
        return ""
    return f"it is not in the cache, and {reason}"


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()
