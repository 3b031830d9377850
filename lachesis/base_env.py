"""`HermesAgentBaseEnv`, the base class of environments. A subclass defines a task and its reward.

    setup()                              load the dataset
    get_next_item()                      the next row, None when there are no more
    format_prompt(item)                  the task, as the agent reads it
    compute_reward(item, result, ctx)    the score of a rollout; `async def`, or plain `def`; or methods with `@reward`

Everything else has a default: `evaluate`, `config_init`, tools, sandboxes, model servers, and the commands
`serve | process | evaluate` of `YourEnv.cli()`. The code that runs environments is in `lachesis.runs`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

from pydantic import BaseModel
from rich.console import Console

import lachesis_client as inference
from backends.errors import SettingsError
from lachesis.authors import wrong_result
from lachesis.rewards.reward import reward_weights, scored_by_steps, scored_otherwise
from lachesis.runs.atropos_base import AtroposBase, overrides
from lachesis.runs.failures import NotRunning
from lachesis.settings.agent_tools import AgentTools, chosen_tools
from lachesis.settings.chosen import as_env_config
from lachesis.settings.class_settings import apply_class_settings
from lachesis.settings.server_settings import EMBEDDED, ServerConfig, as_server_configs, needs_start, token_engine
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_tools import BUILTIN_TOOLS, Tool, ToolRegistry

# Imported where they are used: this module has to be cheap to import, for `--help`.
if TYPE_CHECKING:
    from backends import SandboxSpec
    from lachesis.figures.item_keys import ItemKeys
    from lachesis.loop.result import AgentResult
    from lachesis.loop.rollout import PlayedGroup, Rollout
    from lachesis.loop.rollout_player import RolloutPlayer
    from lachesis.rewards.reward import Reward
    from lachesis.rewards.scorer import Scorer
    from lachesis.runs.judge import Judge
    from lachesis.runs.reference_policy import Policy
    from lachesis.runs.results import RunResult
    from lachesis.tool_context.tool_context import ToolContext


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
    _class_error: ClassVar[SettingsError | None] = None  # of class attributes; commands and the constructor raise it

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: ServerConfig | Sequence[BaseModel],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        """Create an environment without starting anything. Atropos' own settings classes are accepted too."""
        super().__init__()
        if self._class_error is not None:
            raise self._class_error
        self.config = as_env_config(config, self.env_config_cls)
        tools = chosen_tools(self.tools, self.config, self.run_name, user=self.follow_up is not None)
        if tools is not self.tools:
            self.__dict__["tools"] = tools
        self.server_configs = as_server_configs(server_configs)
        workers, per_server = self.config.max_num_workers, self.config.max_num_workers_per_node
        self.max_num_workers = per_server * len(self.server_configs) if workers == -1 else workers
        self.slurm, self.testing, self.process_mode = slurm, testing, False
        self.n_groups_to_process, self.group_size_to_process = self.config.total_steps, self.config.group_size
        self.console = Console(emoji=False, stderr=True)
        self._eval_items: list[Any] | None = None
        self._server: inference.ModelServer | None = None
        self._player: RolloutPlayer | None = None
        self._judge: Judge | None = None
        self.tracker = None
        if not any(needs_start(server) or token_engine(server) for server in self.server_configs):
            from lachesis.runs.model_servers import server_of

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
        if cls.step_rewards and getattr(cls.compute_reward, "__isabstractmethod__", False):
            cls.compute_reward = scored_by_steps  # type: ignore[method-assign]
        others = cls.compute_group_reward is not None or bool(cls._reward_weights)
        if others and getattr(cls.compute_reward, "__isabstractmethod__", False):
            cls.compute_reward = scored_otherwise  # type: ignore[method-assign]
        elif not others and cls.compute_reward is scored_otherwise:
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

        With a `session`, it is called when that is open."""

    @abstractmethod
    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> float | Reward | None:
        """The score of a rollout, a finite number or a `Reward`; None leaves it out. May be a plain `def`."""

    # Methods that a subclass may write.

    follow_up: Callable[..., Any] | None = None
    """`follow_up(item, messages)`: the user's message, text or a `ToolResult`; None ends the rollout.

    `messages` are OpenAI's dicts, the answer last. Without it, the first answer ends the rollout. May be a plain `def`.
    """

    branch_at: Callable[..., Any] | None = None
    """`branch_at(item, history)`: in how many ways a rollout goes on before its next turn, by `history` alone.

    Without it, `tree_at` says so. It needs `tree_leaves`, and may be `async def`. See docs/trees.md.
    """

    session: Callable[..., Any] | None = None
    """`session(item)`: an asynchronous context manager that is open while a rollout is played and scored.

    What it yields is `ctx.session` in rewards, `rollout_session()` in `follow_up` and tools, and the second argument of
    calls of `Tool.from_schema`. With a second parameter it gets the `ToolSession`. See docs/environments.md.
    """

    step_rewards: Literal["sum", "last"] | None = None
    """How rewards of tools and `follow_up` (`ToolResult.reward`) become the score, if no other is defined: their sum or
    the last one; 0 if there were none. Those of a turn are its `turn_rewards`, those of one tool a component."""

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
        """Items that `eval` plays. Default: the first `eval_items` of `get_next_item`, which `serve` then holds out
        of training, so that all its evaluations play the same items."""
        from lachesis.figures.item_keys import first_items

        if self._eval_items is None:
            self._eval_items = await first_items(self.get_next_item, self.config.eval_items)
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
        from lachesis.runs.judge import ask_of_reward

        return ask_of_reward(self._judge, prompt, schema, env=self)

    # The parts of a run.

    @property
    def prepares_sandboxes(self) -> bool:
        """Whether the sandbox needs files or a set-up before its agent starts."""
        return overrides(self, HermesAgentBaseEnv, "sandbox_files", "setup_sandbox")

    @classmethod
    def tool_context_class(cls) -> type[ToolContext]:
        """The class of the contexts that the methods of this environment get."""
        from lachesis.tool_context.tool_context import ToolContext

        return ToolContext

    def scorer(self) -> Scorer:
        """Calls the methods of this environment that score rollouts and set up sandboxes."""
        from lachesis.loop.rollout_session import session_method
        from lachesis.rewards.scorer import Scorer

        if self.follow_up is not None and not self.takes_follow_ups:
            raise SettingsError(
                f"{self.run_name}: follow_up has no effect here: the agent does not take messages from a user"
            )
        others = type(self).compute_reward is scored_otherwise
        return Scorer(
            self.run_name,
            None if others else self.compute_reward,
            self.compute_group_reward,
            timeout=self.config.reward_timeout,
            named={name: (weight, getattr(self, name)) for name, weight in self._reward_weights.items()},
            sandbox_files=self.sandbox_files if self.prepares_sandboxes else None,
            setup_sandbox=self.setup_sandbox if self.prepares_sandboxes else None,
            setup_timeout=self.config.setup_timeout,
            session=session_method(self),
            follow_up=self.follow_up,
            context_class=self.tool_context_class(),
        )

    @property
    def run_name(self) -> str:
        return self.name or type(self).__name__

    @property
    def player(self) -> RolloutPlayer:
        if self._player is None:
            raise NotRunning("rollouts need sandboxes; use the environment inside `async with env.running()`")
        return self._player

    def player_for(self, item: Any) -> RolloutPlayer:
        """The player of the rollouts of one item."""
        own = self.tools_for(item)
        return self.player.with_tools(own, self.tool_definitions) if own else self.player

    @property
    def agent_tools(self) -> AgentTools:
        """The tools that the settings choose from `tools`."""
        return AgentTools(self.config, self.tools)

    def tool_definitions(self) -> list[dict[str, Any]]:
        """OpenAI definitions of the agent's tools; with a `distribution`, of all tools that it may get."""
        return self.agent_tools.definitions()

    def group_tools(self, item_key: str) -> tuple[list[str] | None, list[dict[str, Any]]]:
        """The tools for the group of one item, drawn if there is a `distribution`: equal keys draw the same tools.

        Returns:
            The toolsets that were drawn (None without a distribution), and the definitions of the tools.
        """
        if type(self)._resolve_tools_for_group is not HermesAgentBaseEnv._resolve_tools_for_group:
            return None, self._resolve_tools_for_group()[0]
        drawn = self.agent_tools.draw(item_key)
        return drawn, self.tool_definitions() if drawn is None else self.agent_tools.definitions_of(drawn)

    def missing_toolsets(self) -> list[str]:
        """Toolsets of the removed stack that are named in the settings but have no tools here: they are left out."""
        return self.agent_tools.missing()

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        """The messages with which a rollout of `item` starts."""
        prompt: Any = self.format_prompt(item)
        if not isinstance(prompt, str | list | tuple):
            raise wrong_result(self, self.format_prompt, prompt, "return text, or a list of parts")
        messages = [{"role": "user", "content": prompt}]
        if self.config.system_prompt:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return messages

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
            try:
                with self.collecting(server):
                    yield
            finally:
                self._server, self._player, self._judge = given, None, None

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
        from lachesis.runs import group_player

        return await group_player.play_rollout(self, item, item_key, index, tools, evaluation=evaluation)

    # The commands.

    @classmethod
    def cli(cls) -> NoReturn:
        """`serve | process | evaluate`, from the arguments of this process."""
        from lachesis.runs import command_line
        from lachesis.runs.ending import end_with

        end_with(lambda: command_line.main(cls))

    async def env_manager(self) -> Any:
        """`serve`: play groups for a trainer at Atropos' rollout API; see `lachesis.runs.commands.serve`."""
        from lachesis.runs import commands

        own_items = overrides(self, HermesAgentBaseEnv, "get_eval_items")
        return await commands.serve(self, hold_out=not own_items and not self.evaluates_itself)

    @property
    def evaluates_itself(self) -> bool:
        """Whether a subclass has an `evaluate` of its own."""
        return type(self).evaluate is not HermesAgentBaseEnv.evaluate

    async def evaluate(self, *args: Any, **kwargs: Any) -> RunResult:
        """Play the evaluation items once each and write `metrics.json` next to `samples.jsonl`."""
        from lachesis.runs import commands

        return await commands.evaluate(self)
