"""Atropos' `BaseEnv` as a virtual base class: its attributes and methods, without an import of atroposlib.

`isinstance(env, BaseEnv)` and `issubclass(Env, BaseEnv)` are True once a program has loaded atroposlib, whichever came
first. `BaseEnv` is an ABC, so this needs one call of `BaseEnv.register`. It is made here when atroposlib is loaded
already, and by an import finder when `atroposlib.envs.base` is imported later.
"""

from __future__ import annotations

import json
import time
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rich.console import Console
from rich.table import Table

from backends.lazy import after_import
from lachesis.other_packages import COMPAT, TOKENS
from lachesis.runs.failures import NotRunning
from lachesis.runs.prose import print_table
from lachesis.runs.run_folder import RunFolderError, data_folder, unused
from lachesis.settings.server_settings import ServerConfig, describe, token_engine
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client.model_server import tracks_tokens

if TYPE_CHECKING:
    from lachesis.loop.rollout import PlayedGroup
    from lachesis.runs.registration import Registration
    from lachesis.runs.results import RunResult
    from lachesis_client.model_server import ModelServer

MODULE = "atroposlib.envs.base"

INHERITED = (
    *("add_rollouts_for_wandb", "add_train_workers", "create_rollout_table"),
    *("derived_batch_size", "env_step_checks", "get_cli_evaluate_config_cls", "get_cli_process_config_cls"),
    *("get_cli_serve_config_cls", "get_server_info", "get_status", "handle_env", "handle_send_to_api"),
    *("load_checkpoint", "register_env", "server_cls", "setup_wandb"),
    *("_post_json_with_compression", "_register_env", "_send_scored_data_to_api"),
)
"""The parts of `BaseEnv` that an environment inherits unchanged. Runs call overrides of some of them."""

NEVER_CALLED = (
    *("handle_send_to_api", "handle_env", "env_step_checks", "add_train_workers", "register_env"),
    *("get_server_info", "get_status", "setup_wandb", "_send_scored_data_to_api"),
)
"""Parts of the loop of `BaseEnv` that an environment may override, and that no run calls."""


class _Inherited:
    """An attribute of `BaseEnv`, which is imported when the attribute is used."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, env: Any, env_cls: type) -> Any:
        found = vars(COMPAT.load("atropos"))[self.name]
        return found.__get__(env, env_cls) if hasattr(type(found), "__get__") else found


class AtroposBase(ABC):
    """The part of an environment that programs written for Atropos or for the removed stack rely on."""

    name: ClassVar[str | None] = None
    config: HermesAgentEnvConfig
    server_configs: list[ServerConfig]
    console: Console
    tracker: Any
    """The `Tracker` of lachesis-view, in runs that log to W&B; else None."""
    _server: ModelServer | None

    def __init__(self) -> None:
        """Set what `BaseEnv.__init__` sets, apart from `server`, `tokenizer`, `config` and `max_num_workers`.

        `BaseEnv.__init__` itself is not used: it opens an SDK client for each server (`openai` 3 rejects its default
        empty key), downloads a tokenizer and fixes the output file.
        """
        self.items_sent_this_step = 0
        self.eval_runner: Any = None
        self.workers_added_list: list[Any] = []
        self.succeeded_task_duration: list[float] = []
        self.failed_task_duration: list[float] = []
        self.task_duration: list[float] = []
        self.mainloop_timings: list[float] = []
        self.task_successful: list[Any] = []
        self.last_loop_time: Any = None
        self.last_completed_item: Any = None
        self.workers: set[Any] = set()
        self.eval_workers: set[Any] = set()
        self.backlog: list[Any] = []
        self.rollouts_for_wandb: list[Any] = []
        self.running_items: dict[Any, Any] = {}
        self.wandb_project: str | None = None
        self.wandb_group: str | None = None
        self.wandb_prepend: str | None = None
        self.curr_step = 0
        self.max_token_len = -1
        self.completion_lengths: list[int] = []
        self.checkpoint_dir = ""
        self.checkpoint_interval = -1
        self.jsonl_writer: Any = None
        self._eval_folder: Path | None = None
        self._tokenizer: Any = None
        self._current_group_tools: tuple[list[dict[str, Any]], set[str]] | None = None
        self._recorded: Any = None
        self._collector: Any = None

    def _resolve_tools_for_group(self: Any) -> tuple[list[dict[str, Any]], set[str]]:
        """The definitions of the tools of a group, drawn again if there is a `distribution`, and their names."""
        drawn = self.agent_tools.draw()
        tools = self.tool_definitions() if drawn is None else self.agent_tools.definitions_of(drawn)
        return tools, {tool["function"]["name"] for tool in tools}

    @property
    def server(self) -> ModelServer:
        """The source of completions: a `Router` in Phase 1, a `TokenServer` in Phase 2. In `collect_trajectories` and
        similar methods, the same wrapped in a `RecordedServer`."""
        if self._recorded is not None and self._recorded.in_use:
            return cast("ModelServer", self._recorded)
        if self._server is None:
            raise NotRunning(
                "the model server is not started yet; use the environment inside `async with env.running()`"
            )
        return self._server

    @property
    def tokenizer(self) -> Any:
        """The model's own in Phase 2, else the one named by `tokenizer_name`, loaded at its first use."""
        if tracks_tokens(self._server):
            return self._server.prompts.tokenizer
        if self._tokenizer is None:
            self._tokenizer = TOKENS.load("named_tokenizer")(self.config.tokenizer_name, "env.tokenizer_name")
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    # Names of the removed stack, for environments that play rollouts themselves.

    def _use_managed_server(self) -> bool:
        """Whether the model server reports tokens (Phase 2)."""
        if self._server is not None:
            return tracks_tokens(self._server)
        return any(token_engine(server) for server in self.server_configs)

    # Atropos' hooks. An override of one of the first three makes the environment collect its groups itself: the runs
    # then take what it returns, with the tokens that were recorded meanwhile.

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """One group in Atropos' shape, and an empty backlog. None if nothing in it was scored.

        In Phase 2 it is the group that `serve` would send, or None if `serve` would not send it. If
        `collect_trajectory` is overridden, the group consists of `group_size` of its results.
        """
        if overrides(self, AtroposBase, "collect_trajectory"):
            return cast("tuple[Any, list[Any]]", await COMPAT.load("group_of_trajectories")(self, item))
        return cast("tuple[Any, list[Any]]", await COMPAT.load("own_group")(self, item))

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        """One rollout as an entry of such a group, and an empty backlog. None if it was not scored."""
        return cast("tuple[Any, list[Any]]", await COMPAT.load("own_trajectory")(self, item))

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Change the groups of an item before they are used. Default: unchanged."""
        return trajectories

    async def cleanup(self) -> None:  # noqa: B027 - it need not be written
        """Called after each item whose groups the environment collected itself."""

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Write `data` into the trainer's checkpoint folder. `serve` calls an override at the trainer's checkpoints."""
        COMPAT.load("save_checkpoint")(self, step, data)

    @property
    def collects(self) -> bool:
        """Whether the environment collects its groups itself."""
        return overrides(self, AtroposBase, "collect_trajectories", "collect_trajectory", "postprocess_histories")

    @contextmanager
    def collecting(self, server: ModelServer) -> Iterator[None]:
        """Around a run: record what the environment asks `server`, if it collects its groups itself."""
        if self.collects:
            self._recorded, self._collector = COMPAT.load("collector_of")(self, server)
        try:
            yield
        finally:
            self._recorded = self._collector = None

    async def collect_groups(self, item: Any, item_key: str) -> list[PlayedGroup]:
        """The groups of `item`, as an environment that collects them itself returns them."""
        if self._collector is None:
            raise RuntimeError("groups need sandboxes; use the environment inside `async with env.running()`")
        groups: list[PlayedGroup] = await self._collector.collect(item, item_key)
        return groups

    async def after_group(self, group: PlayedGroup) -> None:
        """A group was kept: call an override of `add_rollouts_for_wandb`."""
        if overrides(self, AtroposBase, "add_rollouts_for_wandb"):
            await COMPAT.load("after_group")(self, group)

    def at_step(self, step: int, registration: Registration) -> None:
        """The trainer has reached another step: load or save the environment's own state, if it has any."""
        if overrides(self, AtroposBase, "save_checkpoint", "load_checkpoint"):
            COMPAT.load("at_step")(self, step, registration)

    async def process_manager(self: Any) -> RunResult:
        """`process`: play and record `total_steps` groups; continues an earlier start."""
        from lachesis.runs import commands

        self.process_mode = True
        return await commands.process(self)

    @property
    def reporting(self) -> Any:
        """The environment whose hooks `evaluate` calls; an environment of Atropos is wrapped by one of ours."""
        return self

    async def _run_evaluate(self: Any) -> Any:
        from lachesis.runs import commands

        return await commands.evaluate_alone(self)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log what happened since the last call. Subclasses add to `wandb_metrics` and call this."""
        from lachesis.figures.summary import training_metrics

        metrics = self.perf_stats(dict(wandb_metrics or {}))
        if self.tracker is not None and self.tracker.on:
            metrics |= training_metrics(self.tracker.take()) | await self.tracker.exclusion_metrics()
            self.tracker.log({**metrics, **self.server.wandb_metrics()}, self.curr_step, prefix=self.wandb_prepend)

    def note_uncalled(self, env_cls: type, base: type, names: Sequence[str] = NEVER_CALLED) -> None:
        """Say which methods between `env_cls` and `base` the run does not call."""
        own = env_cls.__mro__[: env_cls.__mro__.index(base)]
        if found := [name for name in names if any(name in vars(cls) for cls in own)]:
            line = f"{env_cls.__name__} overrides {', '.join(found)}: not called, since the run has its own loop"
            self.console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)

    def perf_stats(self, metrics_dict: dict[str, Any]) -> dict[str, Any]:
        """`metrics_dict` as it is: Atropos adds the timings of its own loop, which does not run here."""
        return metrics_dict

    async def evaluate_log(
        self,
        metrics: Mapping[str, Any],
        task_name: str | None = None,
        model_name: str | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
        generation_parameters: Mapping[str, Any] | None = None,
        samples: Sequence[Mapping[str, Any]] | None = None,
        verbose: bool = True,
    ) -> None:
        """Write `metrics.json`, and `samples.jsonl` if there are samples, into `data_dir_to_save_evals` (default: a
        folder `eval` of the environment's in `data`).

        Args:
            metrics: name -> number.
            task_name: default: the environment's name with `_eval`.
            model_name: default: the names of the servers' models.
            start_time, end_time: seconds since the epoch; default: now.
            generation_parameters: sampling settings to record, in addition to `max_new_tokens`.
            samples: one JSON object each.
            verbose: whether to print the metrics.

        Raises:
            RunFolderError: a file cannot be written. `metrics.json` is then as it was.
        """
        now = time.time()
        seconds = (now if end_time is None else end_time) - (now if start_time is None else start_time)
        task_name = task_name or f"{self.name or type(self).__name__}_eval"
        if verbose:
            table = Table(title=f"{task_name} ({seconds:.1f} s)", show_header=False)
            for name, value in metrics.items():
                table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
            print_table(self.console, table)
        written = {
            "config_general": {
                "model_name": model_name or describe(self.server_configs),
                "total_evaluation_time_seconds": str(seconds),
                "generation_parameters": {
                    "max_new_tokens": self.config.max_token_length,
                    **(generation_parameters or {}),
                },
            },
            "results": {f"atropos|{task_name}|0": metrics, "all": metrics},
        }
        folder = Path(self.config.data_dir_to_save_evals or self._default_eval_folder())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (temporary := folder / "metrics.json.tmp").write_text(json.dumps(written, indent=2), encoding="utf-8")
            temporary.replace(folder / "metrics.json")
            if samples:
                lines = "".join(f"{json.dumps(sample, ensure_ascii=False)}\n" for sample in samples)
                (folder / "samples.jsonl").write_text(lines, encoding="utf-8")
        except OSError as error:
            raise RunFolderError(
                f"cannot write metrics.json and samples to {folder}: {error.strerror or error}; make room there"
            ) from error
        if verbose:
            self.console.print(f"metrics  {folder / 'metrics.json'}", markup=False, highlight=False, soft_wrap=True)

    def _default_eval_folder(self) -> Path:
        """Chosen once per run, next to the evaluations of earlier runs."""
        if self._eval_folder is None:
            self._eval_folder = unused(data_folder(self.name or type(self).__name__) / "eval")
        return self._eval_folder


def overrides(env: object, base: type, *names: str) -> bool:
    """Whether a subclass of `base` that the environment is of defines one of these methods of `base` itself."""
    own = type(env).__mro__
    return any(name in vars(cls) for cls in own[: own.index(base)] for name in names)


for _name in INHERITED:
    setattr(AtroposBase, _name, _Inherited(_name))


def _register(module: ModuleType) -> None:
    module.BaseEnv.register(AtroposBase)


after_import(MODULE, _register)
