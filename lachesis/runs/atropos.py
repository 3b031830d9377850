"""The only module that imports atroposlib, pinned at its last release, 0.4.0.

Lachesis imports this module only when a program uses something of it: atroposlib brings transformers, openai and wandb,
which take three seconds of CPU. `atropos_base` makes environments instances of `BaseEnv` all the same.
"""

from __future__ import annotations

import logging

_level = logging.root.manager.disable
logging.disable(logging.WARNING)  # transformers warns that there is no PyTorch, which nothing here needs
try:
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
finally:
    logging.disable(_level)

__all__ = ["APIServerConfig", "BaseEnv", "BaseEnvConfig", "ScoredDataGroup", "ServerBaseline"]
