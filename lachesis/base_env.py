"""`HermesAgentBaseEnv`, the base class of environments. A subclass defines a task and its reward.

    setup()                              load the dataset
    get_next_item()                      the next row, None when there are no more
    format_prompt(item)                  the task, as the agent reads it
    compute_reward(item, result, ctx)    the score of a rollout; `async def`, or plain `def`; or methods with `@reward`

Everything else has a default: `evaluate`, `config_init`, tools, sandboxes, model servers, and the commands
`serve | process | evaluate` of `YourEnv.cli()`. The code that runs environments is in `lachesis.runs`.
"""

from __future__ import annotations

import asyncio
import sys
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, cast

from pydantic import BaseModel
from rich.console import Console

import lachesis_client as inference
from backends.errors import LachesisError, SettingsError
from backends.tasks import cancel_requests
from lachesis.other_packages import COMPAT, TOKENS
from lachesis.rewards.reward import reward_weights
from lachesis.runs.atropos_base import AtroposBase
from lachesis.settings.class_settings import apply_class_settings
from lachesis.settings.server_settings import EMBEDDED, ServerConfig, as_server_configs, needs_start, token_engine
from lachesis.settings.settings import HermesAgentEnvConfig, as_env_config
from lachesis_client.tracking import tracks_tokens
from lachesis_tools import BUILTIN_TOOLS, Tool, ToolRegistry, get_tool_definitions
from lachesis_tools.distributions import REMOVED_TOOLSETS, distribution, draw_toolsets
from lachesis_tools.terminal import without_carried_folder
from lachesis_tools.toolsets import ToolsetError, has_toolset, left_out_tools

# Imported where they are used: this module has to be cheap to import, for `--help`.
if TYPE_CHECKING:
    from backends import SandboxSpec
    from lachesis.figures.item_keys import ItemKeys
    from lachesis.loop.reference_server import Policy
    from lachesis.loop.result import AgentResult
    from lachesis.loop.rollout import Rollout
    from lachesis.loop.rollout_player import RolloutPlayer
    from lachesis.rewards.reward import Reward
    from lachesis.rewards.scorer import Scorer
    from lachesis.runs.group_player import PlayedGroup
    from lachesis.runs.judge import Judge
    from lachesis.runs.registration import Registration
    from lachesis.runs.results import RunResult
    from lachesis.runs.serve_result import ServeResult
    from lachesis.tool_context.tool_context import ToolContext


class NotRunning(LachesisError, RuntimeError, AttributeError):
    """The environment is used outside a run. An `AttributeError` too, so that `hasattr(env, "server")` is an answer."""


class HermesAgentBaseEnv(AtroposBase):
    """Base of every environment; the module's docstring lists what a subclass writes."""

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = HermesAgentEnvConfig
    tools: ClassVar[ToolRegistry] = BUILTIN_TOOLS
    """Tools that toolset names refer to; extend it with your own tools."""

    toolsets: ClassVar[Sequence[str] | None]
    max_turns: ClassVar[int]
    image: ClassVar[str | None]
    system_prompt: ClassVar[str | None]
    """A class attribute with the name of a setting is its default in this environment; see `class_settings`."""

    needs_sandboxes: ClassVar[bool | None] = None
    """Whether rollouts use sandboxes: a run then checks first that it can create them. None: if the agent has tools."""

    takes_follow_ups: ClassVar[bool] = True
    """Whether a user can answer the agent (`follow_up`)."""

    _reward_weights: ClassVar[Mapping[str, float]] = {}
    """Weights of the methods with `@reward`, by name."""

    _class_error: ClassVar[SettingsError | None] = None
    """An error in the class attributes, which commands and the constructor raise."""

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: ServerConfig | Sequence[BaseModel],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Create an environment without starting anything. Atropos' own settings classes are accepted too."""
        from lachesis.runs.model_servers import server_of
        from lachesis.runs.wandb_tracking import Tracker

        super().__init__()
        if self._class_error is not None:
            raise self._class_error
        self.config = as_env_config(config, self.env_config_cls)
        if not self.config.terminal_carries_cd:
            self.__dict__["tools"] = without_carried_folder(self.tools)
        self.server_configs = as_server_configs(server_configs)
        self.max_num_workers = self.config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = self.config.max_num_workers_per_node * len(self.server_configs)
        self.slurm = slurm
        self.testing = testing
        self.process_mode = False
        self.n_groups_to_process = self.config.total_steps
        self.group_size_to_process = self.config.group_size
        self.console = Console(emoji=False, stderr=True)
        self._tokenizer: Any = None
        self._eval_items: list[Any] | None = None
        self._current_group_tools: tuple[list[dict[str, Any]], set[str]] | None = None
        self._server: inference.ModelServer | None = None
        self._player: RolloutPlayer | None = None
        self._judge: Judge | None = None
        self._recorded: Any = None
        self._collector: Any = None
        self.tracker = Tracker()
        if not any(needs_start(server) or token_engine(server) for server in self.server_configs):
            self._server = inference.Router(
                [server_of(server, tool_call_parser=self.config.tool_call_parser) for server in self.server_configs]
            )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        try:
            apply_class_settings(cls)
        except SettingsError as error:  # raised here, it would end a script that imports the class with 1
            cls._class_error = error
        cls._reward_weights = reward_weights(cls)
        if not cls._reward_weights.keys().isdisjoint(("compute_reward", "compute_group_reward")):
            raise TypeError(f"{cls.__name__}: compute_reward and compute_group_reward take no @reward")
        if cls.step_rewards and getattr(cls.compute_reward, "__isabstractmethod__", False):
            cls.compute_reward = _scored_by_steps  # type: ignore[method-assign]
        others = cls.compute_group_reward is not None or bool(cls._reward_weights)
        if others and getattr(cls.compute_reward, "__isabstractmethod__", False):
            cls.compute_reward = _scored_otherwise  # type: ignore[method-assign]
        elif not others and cls.compute_reward is _scored_otherwise:
            cls.compute_reward = HermesAgentBaseEnv.compute_reward  # type: ignore[method-assign]

    # Methods that a subclass writes.

    async def setup(self) -> None:
        """Load the dataset and other resources. Runs once, before the first item."""

    async def teardown(self) -> None:
        """Release the resources of `setup`. Runs once, even if the run failed."""

    @abstractmethod
    async def get_next_item(self) -> Any:
        """The next item, any JSON value; None when there are no more."""

    @abstractmethod
    def format_prompt(self, item: Any) -> str | list[dict[str, Any]]:
        """The user message that a rollout starts with: text, or OpenAI's content parts, for images.

        With a `session`, it is called when that is open, so `rollout_session()` may have the text.
        """

    @abstractmethod
    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> float | Reward | None:
        """The score of a rollout, a finite number or a `Reward`; None leaves it out. May be a plain `def`."""

    # Methods that a subclass may write.

    follow_up: Callable[..., Any] | None = None
    """`follow_up(item, messages)`: the user's message after an answer of the agent; None ends the rollout.

    `messages` are OpenAI's dicts, the answer last. Without it, the first answer ends the rollout. May be a plain `def`.
    """

    session: Callable[..., Any] | None = None
    """`session(item)`: an asynchronous context manager that is open while a rollout is played and scored.

    Each attempt of a rollout has its own: a game, a connection, a process. What it yields is `ctx.session` in rewards,
    `rollout_session()` in `follow_up` and tools, and the second argument of the calls of `Tool.from_schema`. It opens
    after the sandbox was set up, and closes before the sandbox is removed, however the rollout ends. With a second
    parameter it gets the `ToolSession`, to start something in the sandbox. An exception while it opens is an error of
    the environment, a `BackendError` one of the infrastructure.
    """

    step_rewards: ClassVar[Literal["sum", "last"] | None] = None
    """How rewards of tools (`ToolResult.reward`) become the score, if no other reward is defined: their sum, or the
    last one; 0 if there were none. Those of a turn are its `turn_rewards`, those of a tool are a component."""

    compute_group_reward: Callable[..., Any] | None = None
    """`compute_group_reward(item, results, ctxs)`: the scores of the rollouts of one item, compared with each other.

    It runs after `compute_reward` (whose score is `results[i].reward`) and replaces its scores: one float, `Reward` or
    None for each entry of `results`. All sandboxes stay leased until it returns. May be a plain `def`.
    """

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
        """Defaults of the settings, and the servers, always a list. Default: the embedded model."""
        return cls.env_config_cls(), [ServerConfig(model_name=EMBEDDED)]

    async def get_eval_items(self) -> Sequence[Any]:
        """Items that `evaluate` plays. Default: the first `eval_items` of `get_next_item`, which `serve` then holds out
        of training, so that all its evaluations play the same items."""
        from lachesis.figures.item_keys import or_none

        if self._eval_items is None:
            items: list[Any] = []
            while len(items) < self.config.eval_items and (item := await or_none(self.get_next_item)) is not None:
                items.append(item)
            self._eval_items = items
        return self._eval_items

    def tools_for(self, item: Any) -> Sequence[Tool]:
        """Tools of the rollouts of one item, in addition to those of the toolsets: see `Tool.from_schema`."""
        return ()

    def sandbox_for(self, item: Any, spec: SandboxSpec) -> SandboxSpec:
        """The sandbox for the rollouts of one item: the run's `spec`, or a copy with another image."""
        return spec

    def sandbox_files(self, item: Any) -> Mapping[str, str | bytes | Path]:
        """Files for the agent's workspace: a mapping of paths to text, bytes, or a file or folder of this machine.

        Paths must be inside the workspace. The files are written before `setup_sandbox`.
        """
        return {}

    async def setup_sandbox(self, item: Any, ctx: Any) -> None:
        """Prepare the sandbox of a rollout before the agent's first turn; called again for each attempt.

        `ctx` is a `ToolContext`. An exception is an error of the environment: the rollout has no score and is not
        retried.
        """

    def reference_policy(self) -> Policy | None:
        """A scripted policy for `--openai.model_name reference`; None if the environment has none."""
        return None

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        """Additional metrics of one rollout; their means are shown and logged."""
        return {}

    # For rewards.

    def judge(self, prompt: str, schema: Any) -> Any:
        """Ask the model of the setting `judge_server`, and return its answer to `prompt` as a value of `schema`.

        `schema` is a type that pydantic reads (a model, `bool`, `Literal["yes", "no"]`) or a JSON schema. Await the
        call in an `async def`; in a plain `def` it blocks. Equal questions of a run get one answer.

        Raises:
            JudgeFailed: the model gave no valid answer. This and any failed request leave the rollout unscored.
            JudgeRefused: the model refuses this question because of its content, and has answered others of the run.
            SettingsError: there is no `judge_server`. If a reward raises it, the run ends.
            NotRunning: there is no run.
        """
        from lachesis.rewards.call_scope import current_scope
        from lachesis.rewards.calls import called, result_of

        if self.config.judge_server is None:
            raise SettingsError(
                f"{self.run_name}: judge() asks a second model server; name it with --env.judge_server "
                "'{base_url: URL, model_name: NAME}'"
            )
        if self._judge is None:
            raise NotRunning(f"{self.run_name}: judge() asks the server of env.judge_server, which is there in a run")
        asks = partial(self._judge.ask, prompt, schema)
        return result_of(called("self.judge"), asks, self._judge.loop, current_scope())

    # The parts of a run.

    @property
    def prepares_sandboxes(self) -> bool:
        """Whether the sandbox needs files or a set-up before its agent starts."""
        return overrides(self, "sandbox_files", "setup_sandbox")

    @classmethod
    def tool_context_class(cls) -> type[ToolContext]:
        """The class of the contexts that the methods of this environment get."""
        from lachesis.tool_context.tool_context import ToolContext

        return ToolContext

    def scorer(self) -> Scorer:
        """Calls the methods of this environment that score rollouts and set up sandboxes."""
        from lachesis.rewards.scorer import Scorer

        if self.follow_up is not None and not self.takes_follow_ups:
            raise SettingsError(
                f"{self.run_name}: follow_up has no effect here: the agent does not take messages from a user"
            )
        others = type(self).compute_reward is _scored_otherwise
        return Scorer(
            self.run_name,
            None if others else self.compute_reward,
            self.compute_group_reward,
            timeout=self.config.reward_timeout,
            named={name: (weight, getattr(self, name)) for name, weight in self._reward_weights.items()},
            sandbox_files=self.sandbox_files if self.prepares_sandboxes else None,
            setup_sandbox=self.setup_sandbox if self.prepares_sandboxes else None,
            setup_timeout=self.config.setup_timeout,
            session=self._session_method(),
            follow_up=self.follow_up,
            context_class=self.tool_context_class(),
        )

    def _session_method(self) -> Callable[..., Any] | None:
        """Of the class: an instance may have a `session` of its own, of HTTP for example."""
        own = getattr(type(self), "session", None)
        return partial(own, self) if callable(own) else None

    @property
    def run_name(self) -> str:
        return self.name or type(self).__name__

    @property
    def server(self) -> inference.ModelServer:
        """The source of completions: a `Router` in Phase 1, a `TokenServer` in Phase 2. In `collect_trajectories` and
        similar methods, the same wrapped in a `RecordedServer`."""
        if self._recorded is not None and self._recorded.in_use:
            return cast("inference.ModelServer", self._recorded)
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

    @property
    def player(self) -> RolloutPlayer:
        if self._player is None:
            raise NotRunning("rollouts need sandboxes; use the environment inside `async with env.running()`")
        return self._player

    def player_for(self, item: Any) -> RolloutPlayer:
        """The player of the rollouts of one item."""
        own = self.tools_for(item)
        return replace(self.player, registry=self.player.registry.extended(*own)) if own else self.player

    def tool_definitions(self) -> list[dict[str, Any]]:
        """OpenAI definitions of the agent's tools; with a `distribution`, of all tools that it may get."""
        name = self.config.distribution
        return self._definitions(self.config.enabled_toolsets if name is None else [*distribution(name)])

    def group_tools(self, item_key: str) -> tuple[list[str] | None, list[dict[str, Any]]]:
        """The tools for the group of one item, drawn if there is a `distribution`: equal keys draw the same tools.

        Returns:
            The toolsets that were drawn (None without a distribution), and the definitions of the tools.
        """
        if type(self)._resolve_tools_for_group is not HermesAgentBaseEnv._resolve_tools_for_group:
            return None, self._resolve_tools_for_group()[0]
        if self.config.distribution is None:
            return None, self.tool_definitions()
        drawn = draw_toolsets(self.config.distribution, item_key, exists=self._has_toolset)
        return drawn, self._definitions(drawn)

    def missing_toolsets(self) -> list[str]:
        """Toolsets of the removed stack that are named in the settings but have no tools here: they are left out."""
        config = self.config
        named = config.enabled_toolsets or () if config.distribution is None else distribution(config.distribution)
        return [name for name in dict.fromkeys((*named, *(config.disabled_toolsets or ()))) if self._is_missing(name)]

    def _definitions(self, toolsets: Sequence[str] | None) -> list[dict[str, Any]]:
        disabled = [name for name in self.config.disabled_toolsets or () if not self._is_missing(name)]
        enabled = None if toolsets is None else [name for name in toolsets if not self._is_missing(name)]
        if toolsets and not enabled:
            raise ToolsetError(
                f"none of the toolsets {', '.join(toolsets)} has tools here; choose others, or extend the "
                "environment's `tools` with tools of these toolsets"
            )
        return get_tool_definitions(enabled, disabled, registry=self.tools)

    def left_out_tools(self) -> Mapping[str, str]:
        """The tools in the settings that cannot work on this machine, with the missing requirement."""
        name = self.config.distribution
        toolsets = self.config.enabled_toolsets if name is None else [*distribution(name)]
        known = None if toolsets is None else [each for each in toolsets if not self._is_missing(each)]
        disabled = [each for each in self.config.disabled_toolsets or () if not self._is_missing(each)]
        return left_out_tools(known, disabled, registry=self.tools)

    def _has_toolset(self, name: str) -> bool:
        return has_toolset(name, registry=self.tools)

    def _is_missing(self, name: str) -> bool:
        return name in REMOVED_TOOLSETS and not self._has_toolset(name)

    # Names of the removed stack, for environments that play rollouts themselves.

    def _resolve_tools_for_group(self) -> tuple[list[dict[str, Any]], set[str]]:
        """The definitions of the tools of a group, drawn again if there is a `distribution`, and their names."""
        name = self.config.distribution
        tools = (
            self.tool_definitions()
            if name is None
            else self._definitions(draw_toolsets(name, exists=self._has_toolset))
        )
        return tools, {tool["function"]["name"] for tool in tools}

    def _use_managed_server(self) -> bool:
        """Whether the model server reports tokens (Phase 2)."""
        if self._server is not None:
            return tracks_tokens(self._server)
        return any(token_engine(server) for server in self.server_configs)

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        """The messages with which a rollout of `item` starts."""
        messages = [{"role": "user", "content": self.format_prompt(item)}]
        if self.config.system_prompt:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return messages

    def _first_messages(self, item: Any) -> list[dict[str, Any]] | Callable[[], list[dict[str, Any]]]:
        """`initial_messages`, or the function where a session has to be open for them."""
        return self.initial_messages(item) if self._session_method() is None else partial(self.initial_messages, item)

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        """Set up the dataset, the sandboxes and the model servers, and shut them down at the end.

        `training`: whether a model that this process starts is used with exact tokens.

        Raises:
            BackendUnavailable: the sandboxes cannot be used on this machine.
            InferenceError: no model server answers, or one rejects the key.
            ToolsetError: the toolsets name something that does not exist or is unavailable.
        """
        from lachesis.runs.resources import run_resources

        given = self._server
        async with run_resources(self, given, training=training) as (server, player, self._judge):
            self._server, self._player = server, player
            self.note_uncalled(type(self), HermesAgentBaseEnv)
            if self.collects:
                self._recorded, self._collector = COMPAT.load("collector_of")(self, server)
            try:
                yield
            finally:
                self._server, self._player = given, None
                self._judge = self._recorded = self._collector = None

    def use_server(self, server: inference.ModelServer) -> None:
        """Take completions from `server` instead of the servers in `server_configs`. The next run closes it."""
        if self._player is not None:
            raise RuntimeError(f"{self.run_name}: a run has its server already; call use_server before it begins")
        self._server = server

    def item_keys(self) -> ItemKeys:
        """Keys for the items of one run, in any order; see `lachesis.figures.item_keys`."""
        from lachesis.figures.item_keys import ItemKeys

        return ItemKeys()

    async def play_item(
        self, item: Any, item_key: str, *, size: int, rounds: int = 1, evaluation: bool = False
    ) -> list[PlayedGroup]:
        """The groups of one item, as every run plays them; see `lachesis.runs.group_player.play_item`."""
        from lachesis.runs import group_player

        return await group_player.play_item(self, item, item_key, size=size, rounds=rounds, evaluation=evaluation)

    async def play_rollout(
        self, item: Any, item_key: str, index: int, tools: Sequence[Mapping[str, Any]], *, evaluation: bool = False
    ) -> Rollout:
        """One finished rollout of `item`. An exception in the environment's code ends this rollout only."""
        from lachesis.loop.rollout import Rollout

        before = cancel_requests()
        try:
            player = self.player_for(item)
            return await player.play(
                item,
                self._first_messages(item),
                item_key=item_key,
                index=index,
                tools=tools,
                temperature=self.config.eval_temperature if evaluation else self.config.agent_temperature,
                split="eval" if evaluation else "train",
                spec=self.sandbox_for(item, player.sessions.spec),
            )
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # SystemExit would end the run, with its own exit code
            if isinstance(error, asyncio.CancelledError) and cancel_requests() > before:
                raise
            return Rollout.broken(item_key, index, error)

    # Atropos' hooks. An override of one of the first three makes the environment collect its groups itself: the runs
    # then take what it returns, with the tokens that were recorded meanwhile.

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """One group in Atropos' shape, and an empty backlog. None if nothing in it was scored.

        In Phase 2 it is the group that `serve` would send, or None if `serve` would not send it. If
        `collect_trajectory` is overridden, the group consists of `group_size` of its results.
        """
        if overrides(self, "collect_trajectory"):
            return cast("tuple[Any, list[Any]]", await COMPAT.load("group_of_trajectories")(self, item))
        return cast("tuple[Any, list[Any]]", await COMPAT.load("own_group")(self, item))

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        """One rollout as an entry of such a group, and an empty backlog. None if it was not scored."""
        return cast("tuple[Any, list[Any]]", await COMPAT.load("own_trajectory")(self, item))

    async def postprocess_histories(self, trajectories: Any) -> Any:
        """Change the groups of an item before they are used. Default: unchanged."""
        return trajectories

    async def cleanup(self) -> None:
        """Called after each item whose groups the environment collected itself."""

    def save_checkpoint(self, step: int, data: Mapping[str, Any] | None = None) -> None:
        """Write `data` into the trainer's checkpoint folder. `serve` calls an override at the trainer's checkpoints."""
        COMPAT.load("save_checkpoint")(self, step, data)

    @property
    def collects(self) -> bool:
        """Whether the environment collects its groups itself."""
        return overrides(self, "collect_trajectories", "collect_trajectory", "postprocess_histories")

    async def collect_groups(self, item: Any, item_key: str) -> list[PlayedGroup]:
        """The groups of `item`, as an environment that collects them itself returns them."""
        if self._collector is None:
            raise RuntimeError("groups need sandboxes; use the environment inside `async with env.running()`")
        groups: list[PlayedGroup] = await self._collector.collect(item, item_key)
        return groups

    async def after_group(self, group: PlayedGroup) -> None:
        """A group was kept: call an override of `add_rollouts_for_wandb`."""
        if overrides(self, "add_rollouts_for_wandb"):
            await COMPAT.load("after_group")(self, group)

    def at_step(self, step: int, registration: Registration) -> None:
        """The trainer has reached another step: load or save the environment's own state, if it has any."""
        if overrides(self, "save_checkpoint", "load_checkpoint"):
            COMPAT.load("at_step")(self, step, registration)

    # The commands.

    @classmethod
    def cli(cls) -> NoReturn:
        """`serve | process | evaluate`, from the arguments of this process."""
        from lachesis.runs import command_line

        sys.exit(command_line.main(cls))

    async def env_manager(self) -> ServeResult:
        """`serve`: play groups for a trainer at Atropos' rollout API; see `lachesis.runs.commands.serve`."""
        from lachesis.runs import commands

        default = type(self).get_eval_items is HermesAgentBaseEnv.get_eval_items and not self.evaluates_itself
        return await commands.serve(self, hold_out=default)

    async def process_manager(self) -> RunResult:
        """`process`: play and record `total_steps` groups; continues an earlier start."""
        from lachesis.runs import commands

        self.process_mode = True
        return await commands.process(self)

    @property
    def evaluates_itself(self) -> bool:
        """Whether a subclass has an `evaluate` of its own."""
        return type(self).evaluate is not HermesAgentBaseEnv.evaluate

    @property
    def reporting(self) -> Any:
        """The environment whose hooks `evaluate` calls; an environment of Atropos is wrapped by one of ours."""
        return self

    async def _run_evaluate(self) -> Any:
        from lachesis.runs import commands

        return await commands.evaluate_alone(self)

    async def evaluate(self, *args: Any, **kwargs: Any) -> RunResult:
        """Play the evaluation items once each and write `metrics.json` next to `samples.jsonl`."""
        from lachesis.runs import commands

        return await commands.evaluate(self)

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log what happened since the last call. Subclasses add to `wandb_metrics` and call this."""
        from lachesis.figures.summary import training_metrics

        metrics = self.perf_stats(dict(wandb_metrics or {}))
        if self.tracker.on:
            metrics |= training_metrics(self.tracker.take()) | await self.tracker.exclusion_metrics()
            self.tracker.log({**metrics, **self.server.wandb_metrics()}, self.curr_step, prefix=self.wandb_prepend)


async def _scored_by_steps(self: HermesAgentBaseEnv, item: Any, result: AgentResult, ctx: Any) -> Reward:
    """`compute_reward` of an environment with `step_rewards`."""
    from lachesis.rewards.reward import Reward

    values = [step.value for step in result.step_rewards]
    turns, tools = [0.0] * result.turns_used, dict[str, float]()
    for step in result.step_rewards:
        turns[step.turn - 1] += step.value
        tools[step.tool_name] = tools.get(step.tool_name, 0.0) + step.value
    value = sum(values) if self.step_rewards == "sum" else values[-1] if values else 0.0
    return Reward(value, tools, turn_rewards=turns)


async def _scored_otherwise(self: HermesAgentBaseEnv, item: Any, result: AgentResult, ctx: Any) -> float:
    """`compute_reward` of an environment that has other rewards only: it scores nothing and leaves nothing out."""
    return 0.0


def overrides(env: HermesAgentBaseEnv, *names: str) -> bool:
    """Whether the environment's class defines one of these methods of `HermesAgentBaseEnv` itself."""
    own = type(env).__mro__
    return any(name in vars(cls) for cls in own[: own.index(HermesAgentBaseEnv)] for name in names)
