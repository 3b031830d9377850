"""The only module that imports atroposlib, pinned at its last release, 0.4.0.

Lachesis imports this module only when a program uses something of it: atroposlib brings transformers, openai and wandb,
which take three seconds of CPU. `atropos_base` makes environments instances of `BaseEnv` all the same.
"""

from __future__ import annotations

from lachesis.lazy import quiet_imports

with quiet_imports():  # transformers warns that there is no PyTorch, which nothing here needs
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline

__all__ = ["APIServerConfig", "BaseEnv", "BaseEnvConfig", "ScoredDataGroup", "ServerBaseline"]
