"""The only module that imports atroposlib, pinned at its last release, 0.4.0.

Lachesis imports this module only when a program uses something of it: atroposlib brings transformers, openai and wandb,
which take three seconds of CPU. `atropos_base` makes environments instances of `BaseEnv` all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from backends.errors import SettingsError
from backends.lazy import quiet_imports

try:
    with quiet_imports():  # transformers warns that there is no PyTorch, which nothing here needs
        import atroposlib.envs.base as base_module
        import atroposlib.utils.tokenize_for_trainer as tokenize_module
        from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
        from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
except ModuleNotFoundError as error:
    if error.name != "atroposlib":
        raise
    raise SettingsError(
        "this needs the package atroposlib, which is not installed. Next step: pip install 'lachesis-rl[atropos]'"
    ) from error

__all__ = [
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "ScoredDataGroup",
    "ServerBaseline",
    "built_with",
    "wrap_tokenize_for_trainer",
]


def wrap_tokenize_for_trainer(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace Atropos' `tokenize_for_trainer` for modules that are imported from now on."""
    if not hasattr(tokenize_module.tokenize_for_trainer, "__wrapped__"):
        tokenize_module.tokenize_for_trainer = wrap(tokenize_module.tokenize_for_trainer)


@contextmanager
def built_with(server: Any, tokenizer: Any) -> Iterator[None]:
    """`BaseEnv.__init__` takes this server and this tokenizer inside.

    By itself it opens an SDK client for each server, which openai 3 rejects without a key, and downloads a tokenizer.
    """

    class Tokenizers:
        @staticmethod
        def from_pretrained(*_: Any, **__: Any) -> Any:
            return tokenizer

    own = base_module.ServerManager, base_module.AutoTokenizer
    base_module.ServerManager = lambda *_, **__: server
    base_module.AutoTokenizer = Tokenizers
    try:
        yield
    finally:
        base_module.ServerManager, base_module.AutoTokenizer = own
