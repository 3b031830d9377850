"""The one door to atroposlib, pinned at its last release, 0.4.0.

Atropos is archived, so nothing here waits for a fix. Taken from it: the base class that foreign code checks for, its
configuration models and the shape of its groups. Not taken: its constructor, which opens an SDK client per server
(`openai` 3 refuses its default empty key), downloads a tokenizer and fixes the output file, and its three CLI classes.
"""

from __future__ import annotations

import logging
from typing import Any

_level = logging.root.manager.disable
logging.disable(logging.WARNING)  # transformers tells everybody that there is no PyTorch, which nobody needs here
try:
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.envs.server_handling.server_baseline import APIServerConfig, ServerBaseline
finally:
    logging.disable(_level)

__all__ = ["APIServerConfig", "BaseEnv", "BaseEnvConfig", "ScoredDataGroup", "ServerBaseline", "initial_state"]

DEFAULT_URL = "http://localhost:9004/v1"
"""Where Atropos expects the first local inference server."""


def initial_state(config: BaseEnvConfig) -> dict[str, Any]:
    """What `BaseEnv.__init__` sets on an instance, apart from `server`, `tokenizer`, `config` and `max_num_workers`.

    A test holds this against a real instance of Atropos' own class.
    """
    return {
        "items_sent_this_step": 0,
        "eval_runner": None,
        "workers_added_list": [],
        "succeeded_task_duration": [],
        "failed_task_duration": [],
        "task_duration": [],
        "mainloop_timings": [],
        "task_successful": [],
        "last_loop_time": None,
        "last_completed_item": None,
        "workers": set(),
        "eval_workers": set(),
        "backlog": [],
        "rollouts_for_wandb": [],
        "running_items": {},
        "wandb_project": None,
        "wandb_group": None,
        "curr_step": 0,
        "max_token_len": -1,
        "completion_lengths": [],
        "wandb_prepend": None,
        "checkpoint_dir": "",
        "checkpoint_interval": -1,
        "jsonl_writer": None,
    }


def as_server_configs(given: ServerBaseline | list[APIServerConfig]) -> list[APIServerConfig]:
    """The servers of `config_init()`, always as a list.

    Atropos replaces anything but a list by four servers on localhost and drops `base_url` and `api_key` on the way;
    here a single configuration stays what it says.
    """
    if isinstance(given, list):
        return given
    if isinstance(given, APIServerConfig):
        return [given]
    return [APIServerConfig(**given.model_dump(), base_url=DEFAULT_URL)]
