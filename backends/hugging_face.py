"""The Hugging Face hub, which is asked once whether it can be reached."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hub() -> Iterator[str]:
    """Inside, what loads from the hub logs no retries and, where the hub cannot be reached, takes what is in the cache:
    its library would try for a minute. Yields why it cannot be reached, or nothing."""
    from huggingface_hub import constants

    logger = logging.getLogger("huggingface_hub")
    before = (logger.level, constants.HF_HUB_OFFLINE)
    logger.setLevel(logging.ERROR)
    reason = _why_offline()
    constants.HF_HUB_OFFLINE = bool(reason) or before[1]
    try:
        yield reason
    finally:
        logger.setLevel(before[0])
        constants.HF_HUB_OFFLINE = before[1]


def _why_offline() -> str:
    """By the client of its library, which has its proxies and certificates."""
    from huggingface_hub import get_session
    from huggingface_hub.constants import ENDPOINT

    try:
        get_session().head(ENDPOINT, timeout=10)  # any answer will do
    except Exception as error:  # which types it raises depends on the client
        return f"{ENDPOINT} cannot be reached: {error}"
    return ""
