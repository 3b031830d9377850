"""Environments written for Atropos' `BaseEnv`, unmodified, in our runs.

The environment's own methods decide what is asked, scored and evaluated. Its `self.server` records, and the tokens of
its groups are the recorded ones; see `lachesis_compat.collecting`.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

from pydantic import ConfigDict, Field, ValidationError, create_model
from rich.console import Console

from backends.errors import LachesisError, SettingsError
from backends.text import counted
from lachesis.base_env import HermesAgentBaseEnv
from lachesis.figures.item_keys import ItemError, item_digest
from lachesis.loop.rollout import PlayedGroup
from lachesis.runs.atropos_base import NEVER_CALLED
from lachesis.runs.registration import Registration
from lachesis.runs.run_folder import data_folder
from lachesis.settings.flags import close_names
from lachesis.settings.hooks import of_hook, used_names
from lachesis.settings.server_settings import as_server_configs
from lachesis.settings.setting_facts import NO_FACTS
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_compat.atropos.package import BaseEnv, BaseEnvConfig, built_with, wrap_tokenize_for_trainer
from lachesis_compat.collecting import own_groups
from lachesis_compat.collecting.collector import Collector
from lachesis_compat.collecting.drift import Drift, DriftTotals
from lachesis_compat.collecting.encoded_chats import note_chats, noting_trained
from lachesis_compat.collecting.recorded_server import RecordedServer, describe_servers
from lachesis_compat.collecting.recording import recorded
from lachesis_compat.collecting.returned import ReturnedSample
from lachesis_compat.synchronous import SynchronousToolContext
from lachesis_tokens.server.token_server import TokenServer
from lachesis_tokens.templates.chat_template import read_template

_OF_THE_LOOP = (
    *("enabled_toolsets", "disabled_toolsets", "distribution", "max_agent_turns", "max_tool_calls", "eval_items"),
    *("rollout_token_budget", "reward_timeout", "agent_temperature", "eval_temperature", "ephemeral_system_prompt"),
    *("prefill_messages", "extra_body", "max_resamples", "max_faulty_turns", "terminal_backend", "terminal_options"),
    *("sandbox", "terminal_timeout", "terminal_lifetime", "terminal_image", "terminal_workdir", "terminal_env"),
    *("terminal_carries_cd", "tool_result_format"),
    *("compress_context_at", "compress_context_to", "compress_context_keep", "compress_context_with"),
    *("judge_server", "setup_timeout"),
    *("terminal_network", "terminal_cpus", "terminal_memory", "terminal_pids", "terminal_disk", "sandbox_profile"),
)
"""Settings of our agent loop and its sandboxes, which an environment of Atropos does not use."""


class PlayerConfig(HermesAgentEnvConfig):
    """The settings of a run with an environment of Atropos; the environment's own settings are added."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())

    thinking_mode: Annotated[bool, NO_FACTS] = Field(
        default=False, description="Read by the environment; nothing is added to requests (see --openai.extra_body)."
    )
    custom_thinking_prompt: Annotated[str | None, NO_FACTS] = Field(
        default=None, description="Read by the environment."
    )
    override_sampling: dict[str, Any] = Field(
        default_factory=dict,
        description="Sampling parameters that replace the environment's in training requests, for example "
        "'{top_p: 1.0}': a trainer can use neither top_p nor top_k.",
    )


class EvaluationFailed(LachesisError):
    """A model server failed during an evaluation: its figures would count that as the model's failure."""


class AtroposPlayer(HermesAgentBaseEnv):
    """One environment of Atropos in a run of ours. `player_for` makes a subclass for each environment's class."""

    stock_cls: ClassVar[Any] = None
    stock_config_cls: ClassVar[Any] = BaseEnvConfig
    own_fields: ClassVar[frozenset[str]] = frozenset()
    """Settings that the environment defines."""
    drift: ClassVar[str | None] = None
    """How the returned tokens are compared with the sampled ones: "text" or "json" lines; None for not at all."""

    def __init__(self, config: Any, server_configs: Any, slurm: bool = False, testing: bool = False) -> None:
        super().__init__(config, server_configs, slurm, testing)
        ours = [name for name in _OF_THE_LOOP if name not in self.own_fields]
        default = type(self).config_init()[0]
        if idle := [f"env.{name}" for name in ours if getattr(self.config, name) != getattr(default, name)]:
            raise SettingsError(
                f"{', '.join(idle)}: a setting of Lachesis' agent loop, which {self.stock_cls.__name__} does not use; "
                "leave it out"
            )
        self.stock: Any = None
        """The environment; made when the run starts."""
        self.drift_totals = DriftTotals()
        self._collecting = 0
        self._ended = asyncio.Event()
        self._outside = 0
        self._opaque = 0

    @classmethod
    def tool_context_class(cls) -> type[SynchronousToolContext]:
        return SynchronousToolContext

    # The run.

    @property
    def collects(self) -> bool:
        return True

    @property
    def evaluates_itself(self) -> bool:
        return _has(self.stock_cls, "evaluate")

    @property
    def reporting(self) -> Any:
        return self.stock

    @property
    def server(self) -> Any:
        return self._server

    @property
    def curr_step(self) -> int:
        """The step, which the environment reads too."""
        return int(self.__dict__.get("curr_step", 0))

    @curr_step.setter
    def curr_step(self, step: int) -> None:
        self.__dict__["curr_step"] = step
        if self.__dict__.get("stock") is not None:
            self.stock.curr_step = step

    async def setup(self) -> None:
        """Nothing: the environment's own `setup` runs when the servers are there."""

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        async with super().running(training=training):
            note_chats()
            with _context_threads():
                async with self._set_up():
                    yield

    @asynccontextmanager
    async def _set_up(self) -> AsyncIterator[None]:
        """Around the run, with the servers there: the environment is made and set up."""
        server = self._server
        if isinstance(server, TokenServer):
            server = server.with_reasoning_in_text()
        recorded_server = RecordedServer(
            describe_servers(self.server_configs), sampling=cast(PlayerConfig, self.config).override_sampling
        )
        assert server is not None
        recorded_server.bind(server)
        recorded_server.tell = partial(own_groups.tell, self)
        await self._load_tokenizer()
        self.stock = self._built(recorded_server)
        self._recorded = recorded_server
        self._collector = Collector(
            source=self.stock,
            name=self.run_name,
            decode=partial(own_groups.decode, self),
            ends=partial(own_groups.special_tokens, self),
            max_retries=self.config.max_infra_retries,
            timeout=self.config.rollout_timeout,
            tell=partial(own_groups.tell, self),
            on_drift=self._compared if self.drift else None,
        )
        self.note_uncalled(self.stock_cls, BaseEnv, (*NEVER_CALLED, "env_manager", "process_manager"))
        async with self._outside_of_items():
            await of_hook(self.stock.setup())
        try:
            yield
        finally:
            self._report()

    async def _load_tokenizer(self) -> None:
        """Where the environment uses one that is not the model's own: once, and before anything is sampled."""
        if isinstance(self._server, TokenServer) or "tokenizer" not in used_names(self.stock_cls):
            return
        own_groups.tell(self, f"loading the tokenizer {self.config.tokenizer_name} (env.tokenizer_name)")
        await asyncio.to_thread(lambda: self.tokenizer)

    def _built(self, server: RecordedServer) -> Any:
        """The environment, made by its own `__init__`."""
        config = self.config
        tokenizer: Any = _LateTokenizer(self)
        if isinstance(self._server, TokenServer):
            tokenizer = copy.deepcopy(self._server.prompts.tokenizer)  # environments set its padding
            if config.chat_template is not None:
                tokenizer.chat_template = read_template(config.chat_template)
        cls = self.stock_cls
        if not self.evaluates_itself:
            cls = type(cls.__name__, (cls,), {"evaluate": _no_evaluate, "__module__": cls.__module__})
        with built_with(server, tokenizer):
            stock = cls(self._stock_config(), [], slurm=self.slurm, testing=self.testing)
        if not _has(cls, "collect_trajectories"):
            stock.collect_trajectories = partial(own_groups.group_of_trajectories, stock)
        stock.process_mode = self.process_mode
        stock.n_groups_to_process, stock.group_size_to_process = self.n_groups_to_process, self.group_size_to_process
        stock.curr_step = self.curr_step
        write = stock.evaluate_log

        async def evaluate_log(*args: Any, **kwargs: Any) -> None:
            self._no_failures()
            await write(*args, **kwargs)
            written = Path(stock.config.data_dir_to_save_evals) / "metrics.json"
            self.console.print(f"metrics  {written}", markup=False, highlight=False, soft_wrap=True)

        stock.evaluate_log = evaluate_log
        return stock

    def _stock_config(self) -> Any:
        """The settings as the environment's own class. Files of groups are written by the run."""
        fields = self.stock_config_cls.model_fields
        values = {name: value for name, value in self.config if name in fields}
        for name in fields.keys() - self.own_fields:
            value = values.get(name)
            values[name] = getattr(value, "value", value)
        values["data_path_to_save_groups"] = None
        values["data_dir_to_save_evals"] = values.get("data_dir_to_save_evals") or str(
            data_folder(self.run_name) / "eval"
        )
        try:
            return self.stock_config_cls(**{name: value for name, value in values.items() if name in fields})
        except ValidationError as error:
            raise SettingsError(f"the settings of {self.stock_cls.__name__}: {error}") from error

    def tool_definitions(self) -> list[dict[str, Any]]:
        return []

    # Items.

    async def get_next_item(self) -> Any:
        """An item of the backlog, else the environment's next one. While items that may add to the backlog are run,
        an environment without further items is waited with."""
        while True:
            if self.stock.backlog:
                return self._item(self.stock.backlog.pop())
            async with self._outside_of_items():
                item = await self.stock.get_next_item()
            if item is not None:
                return self._item(item)
            if not self._collecting:
                return None
            self._ended.clear()
            await self._ended.wait()

    def _item(self, item: Any) -> Any:
        try:
            item_digest(item)
        except ItemError as error:
            if not self._opaque:
                own_groups.tell(self, f"a second start will not recognise finished items: {error}")
            self._opaque += 1
            return OpaqueItem(item, self._opaque)
        return item

    async def collect_groups(self, item: Any, item_key: str) -> list[PlayedGroup]:
        assert self._collector is not None
        self._collecting += 1
        try:
            groups = await self._collector.collect(_plain_item(item), item_key)
            return [replace(group, item=item) for group in groups]
        finally:
            self._collecting -= 1
            self._ended.set()

    @asynccontextmanager
    async def _outside_of_items(self) -> AsyncIterator[None]:
        """Around code of the environment that may ask the model, but collects no group."""
        with recorded(trains=False) as recording:
            yield
        self._outside += sum(each.response.usage.completion_tokens or 0 for each in recording.completions)
        if recording.error is not None:
            raise recording.error

    # The environment's hooks.

    async def after_group(self, group: PlayedGroup) -> None:
        scored = own_groups.atropos_group(group)
        await own_groups.call_hook(self, self.stock.add_rollouts_for_wandb, scored, _plain_item(group.item))

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        from lachesis.figures.summary import training_metrics

        metrics = dict(wandb_metrics or {})
        if self.tracker is not None and self.tracker.on:
            metrics |= training_metrics(self.tracker.take()) | await self.tracker.exclusion_metrics()

        async def wandb_log(metrics: dict[str, Any]) -> None:
            call = self.stock.wandb_log(metrics)
            await (call if self.tracker is None else self.tracker.hook(call))

        if self.tracker is None or not self.tracker.lost:
            await own_groups.call_hook(self, wandb_log, metrics)

    def at_step(self, step: int, registration: Registration) -> None:
        own_groups.at_step(self.stock, step, registration)

    async def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """The environment's own. Where a server failed, nothing is written.

        Raises:
            EvaluationFailed: a model server failed, whatever the environment made of it.
            SettingsError: the environment has none.
        """
        if not self.evaluates_itself:
            raise SettingsError(f"{self.stock_cls.__name__} has no evaluate(): write one; process needs none")
        if self.config.data_dir_to_save_evals:
            self.stock.config.data_dir_to_save_evals = self.config.data_dir_to_save_evals
        Path(self.stock.config.data_dir_to_save_evals).mkdir(parents=True, exist_ok=True)
        with recorded(trains=False) as recording:
            self._evaluation = recording
            try:
                result = await self.stock.evaluate(*args, **kwargs)
            except Exception:
                self._no_failures()
                raise
            self._no_failures()
        return result

    def _no_failures(self) -> None:
        error = self._evaluation.error
        if error is not None:
            raise EvaluationFailed(f"a model server failed during the evaluation, which is not written: {error}")

    async def env_manager(self) -> Any:
        from lachesis.runs import commands

        if not self.evaluates_itself and self.config.steps_per_eval > 0:
            own_groups.tell(self, f"{self.stock_cls.__name__} has no evaluate(): nothing is evaluated meanwhile")
            self.config.steps_per_eval = 0
        return await commands.serve(self, hold_out=False)

    # The report.

    def _compared(self, key: str, returned: ReturnedSample, drift: Drift) -> None:
        self.drift_totals.add(drift)
        if self.drift == "json":
            self._say(json.dumps({"item": key, "sample": returned.place, **drift.to_record()}))
        else:
            self._say(f"{key} sample {returned.place}: {drift.describe()}")

    def _report(self) -> None:
        if self._collector is not None:
            self.drift_totals.refused = self._collector.refused
        if self.drift == "json":
            self._say(json.dumps({"environment": self.run_name, **self.drift_totals.to_record()}))
        elif self.drift:
            self._say(f"{self.run_name}: {self.drift_totals.describe()}")
        elif self.drift_totals.refused:
            refused = self.drift_totals.refused
            own_groups.tell(self, f"{counted(refused, 'sample')} refused; the groups have the reasons")
        if self._outside:
            own_groups.tell(self, f"{counted(self._outside, 'token')} sampled outside of items, in no group")
        if left := len(self.stock.backlog):
            own_groups.tell(self, f"{counted(left, 'item')} of the backlog not run")

    def _say(self, line: str) -> None:
        Console(emoji=False).print(line, markup=False, highlight=False, soft_wrap=True)

    # Methods of our own environments, none of which is called.

    def format_prompt(self, item: Any) -> str:
        raise NotImplementedError(f"{self.stock_cls.__name__} collects its groups itself")

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float | None:
        raise NotImplementedError(f"{self.stock_cls.__name__} collects its groups itself")


class OpaqueItem:
    """An item that is not plain data: it is identified by its number in this start."""

    def __init__(self, item: Any, number: int) -> None:
        self.item = item
        self.number = number

    def model_dump(self) -> dict[str, Any]:
        """The form in which it is recorded."""
        return {"type": type(self.item).__qualname__, "number": self.number}


def player_for(stock_cls: Any) -> type[AtroposPlayer]:
    """A class of our own that runs environments of an Atropos class.

    Raises:
        SettingsError: it is not a subclass of `BaseEnv`.
    """
    bases = getattr(stock_cls, "__mro__", ())
    if BaseEnv not in bases and HermesAgentBaseEnv not in bases:
        raise SettingsError(f"{stock_cls!r} is not a subclass of atroposlib's BaseEnv")
    if HermesAgentBaseEnv in bases:
        raise SettingsError(f"{stock_cls.__name__} is an environment of our own: run its file, or its cli()")
    _check_methods(stock_cls)
    defaults, servers = stock_cls.config_init()
    stock_config_cls = type(defaults)
    own = frozenset(stock_config_cls.model_fields.keys() - BaseEnvConfig.model_fields.keys())
    fields: dict[str, Any] = {}
    for name, field in stock_config_cls.model_fields.items():
        value = getattr(defaults, name)
        ours = HermesAgentEnvConfig.model_fields.get(name)
        if ours is None or name in own:
            fields[name] = (field.annotation, Field(default=value, description=field.description))
    config_cls = create_model(f"{stock_cls.__name__}Settings", __base__=PlayerConfig, **fields)
    chosen = {
        name: getattr(value, "value", value)
        for name, value in defaults
        if name in config_cls.model_fields
        and name not in fields
        and name != "use_wandb"  # Atropos' examples set it; a run without an account could not start
        and value != HermesAgentEnvConfig.model_fields[name].get_default(call_default_factory=True)
    }
    ours_configs = as_server_configs(servers)

    def config_init(cls: Any) -> tuple[Any, list[Any]]:
        return config_cls(**copy.deepcopy(chosen)), copy.deepcopy(ours_configs)

    return type(
        stock_cls.__name__,
        (AtroposPlayer,),
        {
            "__module__": __name__,
            "__doc__": stock_cls.__doc__ or f"{stock_cls.__name__}, an environment of Atropos.",
            "name": stock_cls.name or stock_cls.__name__,
            "env_config_cls": config_cls,
            "stock_cls": stock_cls,
            "stock_config_cls": stock_config_cls,
            "own_fields": own,
            "config_init": classmethod(config_init),
        },
    )


def _has(stock_cls: Any, name: str) -> bool:
    """Whether the environment's class defines a method of `BaseEnv` itself."""
    return getattr(stock_cls, name) is not getattr(BaseEnv, name)


async def _no_evaluate(*_: Any, **__: Any) -> None:
    """In the place of the abstract method."""


def _check_methods(stock_cls: Any) -> None:
    """Raises SettingsError where an environment lacks a method without which none can run."""
    needed = {"setup": "setup", "get_next_item": "get_next_item"}
    if not _has(stock_cls, "collect_trajectories"):
        needed["collect_trajectory"] = "collect_trajectory (or collect_trajectories)"
    own = [name for cls in stock_cls.__mro__[: stock_cls.__mro__.index(BaseEnv)] for name in vars(cls)]
    for name, shown in needed.items():
        if not _has(stock_cls, name):
            near = close_names(name, [each for each in own if not hasattr(BaseEnv, each)])
            hint = f"; did you mean that by {near[0]}?" if near else ""
            raise SettingsError(f"{stock_cls.__name__} has no {shown}, which its class must define{hint}")


def prepare_imports() -> None:
    """Before a module of an environment is imported: note what it encodes for trainers."""
    wrap_tokenize_for_trainer(noting_trained)


class _LateTokenizer:
    """The tokenizer of Phase 1, loaded when the environment first uses it."""

    def __init__(self, player: AtroposPlayer) -> None:
        object.__setattr__(self, "_player", player)
        object.__setattr__(self, "_made", None)

    def _tokenizer(self) -> Any:
        if self._made is None:
            object.__setattr__(self, "_made", self._player.tokenizer)
        return self._made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._tokenizer(), name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer()(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer())


class _ContextThreads(ThreadPoolExecutor):
    """Threads that know the item of their caller, as those of `asyncio.to_thread` do."""

    players = 0
    before: Any = None

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        return super().submit(copy_context().run, fn, *args, **kwargs)


@contextmanager
def _context_threads() -> Iterator[None]:
    """While players run on the event loop, its default executor is `_ContextThreads`; then it is the one before."""
    loop: Any = asyncio.get_running_loop()
    before = loop._default_executor  # asyncio can set it, but neither tell nor unset it
    threads = before if isinstance(before, _ContextThreads) else _ContextThreads()
    if threads is not before:
        loop.set_default_executor(threads)
        threads.before = before
    threads.players += 1
    try:
        yield
    finally:
        threads.players -= 1
        if not threads.players and loop._default_executor is threads:
            loop._default_executor = threads.before
            threads.shutdown(wait=False)


def _plain_item(item: Any) -> Any:
    return item.item if isinstance(item, OpaqueItem) else item
