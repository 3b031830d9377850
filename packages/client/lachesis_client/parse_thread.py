"""Long prompts are encoded and long completions parsed in a thread, so that the event loop can continue with all other
rollouts."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, Final, TypeVar

T = TypeVar("T")

LONG_TEXT: Final = 50_000
"""Characters of a long text. A parser reads 20 to 100 in a microsecond, and tags without meaning slower; a tokenizer
encodes 2."""
LONG_IDS: Final = 8_000
"""Tokens of a long completion."""


@cache
def _thread() -> ThreadPoolExecutor:
    """One thread: the event loop waits up to 5 ms (`sys.getswitchinterval`) for each thread that runs Python code."""
    return ThreadPoolExecutor(1, "lachesis-parser")


os.register_at_fork(after_in_child=_thread.cache_clear)  # a forked process has no threads


async def parse(long: bool, read: Callable[[], T]) -> T:
    """`read()`, in the thread if what it reads is `long`."""
    return await asyncio.get_running_loop().run_in_executor(_thread(), read) if long else read()


def is_long(*messages: Any) -> bool:
    """Whether messages of OpenAI's form have a long text together."""
    return sum(_length(message.get("content")) for message in messages) > LONG_TEXT


def _length(content: Any) -> int:
    if isinstance(content, list):
        return sum(_length(part.get("text")) for part in content if isinstance(part, Mapping))
    return len(content) if isinstance(content, str) else 0
