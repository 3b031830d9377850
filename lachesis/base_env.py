"""`HermesAgentBaseEnv`: what an environment inherits. A subclass says what is asked and what it is worth.

    setup()                              load the dataset
    get_next_item()                      one row of it, None when there are no more
    format_prompt(item)                  what the agent is asked
    compute_reward(item, result, ctx)    what it is worth; `async def`, or plain `def`

Everything else has a default: `evaluate`, `config_init`, tools, sandboxes, model servers, and the commands
`serve | process | evaluate` of `YourEnv.cli()`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from rich.console import Console

from backends import Backend, BackendError, BackendUnavailable, SandboxSpec, create_backend
from lachesis.agent.result import AgentResult
from lachesis.agent.reward_threads import RewardThreads
from lachesis.agent.rollout import Rollout, RolloutPlayer, is_cancelled, with_metrics
from lachesis.inference import Router, TokenServer
from lachesis.runs import command_line as cli
from lachesis.runs.atropos import APIServerConfig, BaseEnv, ServerBaseline, as_server_configs, initial_state
from lachesis.runs.items import item_digest
from lachesis.runs.model_servers import (
    ServerConfig,
    ServerConfigError,
    describe,
    needs_start,
    server_of,
    start_servers,
    token_engine,
)
from lachesis.runs.process import ProcessRun, RunFiles, RunResult, RunStopped
from lachesis.runs.records import group_record
from lachesis.runs.serve_progress import ServeResult
from lachesis.runs.serve_setup import ANY_TRAINER, judge, play_whole_group, refuse_off_policy, refuse_phase_1, serve_run
from lachesis.runs.settings import HermesAgentEnvConfig
from lachesis.runs.summary import evaluation_metrics, training_metrics
from lachesis.runs.wandb_tracking import Tracker
from lachesis.testing.reference_server import Policy
from lachesis.tools import BUILTIN_TOOLS, ToolRegistry, ToolSessions, get_tool_definitions
from lachesis.training.serve_settings import Sendable

log = logging.getLogger(__name__)

REWARD_THREADS = 64
"""Plain `def` rewards that may run at once."""


class HermesAgentBaseEnv(BaseEnv):
    """Base of every environment; see the module's text for what a subclass writes."""

    name: ClassVar[str | None] = None
    env_config_cls: ClassVar[type[HermesAgentEnvConfig]] = HermesAgentEnvConfig
    tools: ClassVar[ToolRegistry] = BUILTIN_TOOLS
    """Tools that toolset names refer to; extend it for tools of your own."""

    def __init__(
        self,
        config: HermesAgentEnvConfig,
        server_configs: ServerBaseline | list[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        # Not BaseEnv.__init__: it would open SDK clients and download a tokenizer (lachesis/runs/atropos.py).
        for attribute, value in initial_state(config).items():
            setattr(self, attribute, value)
        self.config = config.model_copy()
        self.server_configs = as_server_configs(server_configs)
        self.max_num_workers: int = config.max_num_workers
        if self.max_num_workers == -1:
            self.max_num_workers = config.max_num_workers_per_node * len(self.server_configs)
        self.slurm = slurm
        self.testing = testing
        self.process_mode = False
        self.n_groups_to_process = config.total_steps
        self.group_size_to_process = config.group_size
        self.console = Console(stderr=True)
        self._tokenizer: Any = None
        self._eval_items: list[Any] | None = None
        self._server: Router | TokenServer | None = None
        self._player: RolloutPlayer | None = None
        self._tracker = Tracker()
        if not any(needs_start(server) or token_engine(server) for server in self.server_configs):
            self._server = Router(
                [server_of(server, tool_call_parser=config.tool_call_parser) for server in self.server_configs]
            )

    # What a subclass writes.

    async def setup(self) -> None:
        """Load what the environment needs. Runs once, before the first item."""

    async def teardown(self) -> None:
        """End what `setup` began. Runs once, also when the run failed."""

    @abstractmethod
    async def get_next_item(self) -> Any:
        """The next item, anything that JSON can hold; None when there are no more."""

    @abstractmethod
    def format_prompt(self, item: Any) -> str:
        """The user message that a rollout starts with."""

    @abstractmethod
    async def compute_reward(self, item: Any, result: AgentResult, ctx: Any) -> float:
        """What a rollout is worth, a finite number; None leaves it out. May be a plain `def`."""

    # What a subclass may write.

    @classmethod
    def config_init(cls) -> tuple[HermesAgentEnvConfig, list[APIServerConfig]]:
        """Defaults of the settings, and the servers, always a list. Default: the embedded model."""
        return cls.env_config_cls(), [ServerConfig(model_name="embedded")]

    async def get_eval_items(self) -> Sequence[Any]:
        """Items that `evaluate` plays. Default: the first `eval_items` of `get_next_item`, which `serve` then holds out
        of training, so that all its evaluations play the same ones."""
        if self._eval_items is None:
            items: list[Any] = []
            while len(items) < self.config.eval_items and (item := await self.get_next_item()) is not None:
                items.append(item)
            self._eval_items = items
        return self._eval_items

    def sandbox_for(self, item: Any, spec: SandboxSpec) -> SandboxSpec:
        """What the sandbox of one item's rollouts is to be: `spec`, the run's, or a changed copy with another image."""
        return spec

    def reference_policy(self) -> Policy | None:
        """A scripted policy for `--openai.model_name reference`; None when the environment has none."""
        return None

    def rollout_metrics(self, item: Any, result: AgentResult, reward: float | None) -> Mapping[str, float]:
        """Figures of the environment's own for one rollout; their means are shown and logged."""
        return {}

    # The parts of a run.

    @property
    def run_name(self) -> str:
        return self.name or type(self).__name__

    @property
    def server(self) -> Router | TokenServer:
        """Where completions come from: a `Router` in Phase 1, a `TokenServer` in Phase 2."""
        if self._server is None:
            raise RuntimeError(
                "the model server is not started yet; use the environment inside `async with env.running()`"
            )
        return self._server

    @property
    def tokenizer(self) -> Any:
        """The model's own in Phase 2, else the one named by `tokenizer_name`, loaded when first asked for."""
        if isinstance(self._server, TokenServer):
            return self._server.prompts.tokenizer
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.config.tokenizer_name)
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def player(self) -> RolloutPlayer:
        if self._player is None:
            raise RuntimeError("rollouts need sandboxes; use the environment inside `async with env.running()`")
        return self._player

    def tool_definitions(self) -> list[dict[str, Any]]:
        """OpenAI definitions of the tools that the agent gets."""
        return get_tool_definitions(self.config.enabled_toolsets, self.config.disabled_toolsets, registry=self.tools)

    def initial_messages(self, item: Any) -> list[dict[str, Any]]:
        """The conversation that a rollout of `item` starts with."""
        messages = [{"role": "user", "content": self.format_prompt(item)}]
        if self.config.system_prompt:
            messages.insert(0, {"role": "system", "content": self.config.system_prompt})
        return messages

    @asynccontextmanager
    async def running(self, *, training: bool = False) -> AsyncIterator[None]:
        """Set up the dataset, the sandboxes and the model servers, and end them again.

        `training`: a model that is started here is used with exact tokens.

        Raises:
            BackendUnavailable: the sandboxes cannot be used on this machine.
            InferenceError: no model server answers, or one refuses the key.
            ToolsetError: the toolsets name something that does not exist or is unavailable.
        """
        async with AsyncExitStack() as stack:
            config = self.config
            try:
                backend = create_backend(config.terminal_backend, **config.backend_options())
            except ValueError as error:
                raise BackendUnavailable(f"terminal_backend {config.terminal_backend!r}: {error}") from error
            try:
                spec = config.sandbox_spec({"environment": self.run_name})
            except ValueError as error:
                raise BackendUnavailable(f"the settings of the sandboxes: {error}") from error
            if self.tool_definitions():
                await _prove_backend(backend, spec)
            sessions = ToolSessions(backend, spec, terminal_timeout=float(config.terminal_timeout))
            stack.push_async_callback(sessions.close_all)
            await self.setup()
            stack.push_async_callback(self.teardown)
            if self._server is None:
                self._server = await start_servers(
                    self.server_configs,
                    settings=config,
                    policy=self.reference_policy(),
                    stack=stack,
                    training=training,
                )
                stack.callback(setattr, self, "_server", None)
            else:
                stack.push_async_callback(self.server.close)
            if not self.testing:
                await self.server.check()
            if isinstance(self.server, TokenServer):
                await self._prove_template(self.server)
            self._player = RolloutPlayer(
                config=config,
                server=self.server,
                sessions=sessions,
                registry=self.tools,
                compute_reward=self.compute_reward,
                reward_threads=RewardThreads(REWARD_THREADS),
                max_seconds=_worker_seconds(config) if training else None,
            )
            try:
                yield
            finally:
                self._player = None

    async def _prove_template(self, server: TokenServer) -> None:
        """Say once how the chat template continues conversations; a template that hides the tools is an error."""
        verdict = await asyncio.to_thread(lambda: server.prompts.template_report)
        self.console.print(verdict.describe(), markup=False, highlight=False, soft_wrap=True)
        if self.tool_definitions() and not verdict.shows_tools:
            raise ServerConfigError(
                "the model's chat template does not show it the tools; set --env.chat_template to one that does "
                "(lachesis/inference/templates/hermes.jinja fits models that speak ChatML), or "
                "--env.enabled_toolsets '[]'"
            )

    async def play_rollout(
        self, item: Any, item_key: str, index: int, tools: Sequence[Mapping[str, Any]], *, evaluation: bool = False
    ) -> Rollout:
        """One finished rollout of `item`. An exception in the environment's code stays this rollout's own."""
        player = self.player
        try:
            rollout = await player.play(
                item,
                self.initial_messages(item),
                item_key=item_key,
                index=index,
                tools=tools,
                temperature=self.config.eval_temperature if evaluation else self.config.agent_temperature,
                split="eval" if evaluation else "train",
                spec=self.sandbox_for(item, player.sessions.spec),
            )
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and is_cancelled():
                raise
            return Rollout.broken(item_key, index, error)
        return with_metrics(rollout, lambda result, reward: self.rollout_metrics(item, result, reward))

    async def collect_trajectories(self, item: Any) -> tuple[dict[str, Any] | None, list[Any]]:
        """One group in Atropos' shape, and no backlog. None when nothing in it was scored.

        In Phase 2 it is what `serve` would send, and None where that would be refused.
        """
        key = item_digest(item)
        if isinstance(self.server, TokenServer):
            verdict = await asyncio.to_thread(judge, await play_whole_group(self, item, key), self.config, ANY_TRAINER)
            return (dict(verdict.payload) if isinstance(verdict, Sendable) else None), []
        tools, rollouts = await self._play_group(item, key, self.config.group_size)
        group = group_record(
            environment=self.run_name,
            item=item,
            item_key=key,
            tools=tools,
            model=describe(self.server_configs),
            rollouts=rollouts,
        )
        return (group if group["scores"] else None), []

    # The commands.

    @classmethod
    def cli(cls) -> NoReturn:
        """`serve | process | evaluate`, from the arguments of this process."""
        sys.exit(cli.main(cls))

    async def env_manager(self) -> ServeResult:
        """`serve`: play groups for a trainer behind Atropos' rollout API, and send the tokens exactly as sampled.

        Raises:
            Phase1CannotTrain: a server that reports no tokens.
            ServerConfigError: sampling settings whose logprobs would not be those of the policy, or a chat template
                that does not show the tools.
            RunStopped: the run cannot go on; what is finished is in the spool.
        """
        refuse_phase_1(self)
        async with self._tracker.tracking(self, job="serve"), self.running(training=True):
            server = self.server
            assert isinstance(server, TokenServer)
            refuse_off_policy(server, self.config)
            await self._hold_out()
            return await serve_run(self, server).run()

    async def _hold_out(self) -> None:
        """Take the items of evaluations out of the stream before training does: after a restart they are the same."""
        own, base, wanted = type(self), HermesAgentBaseEnv, self.config.eval_items
        default = own.get_eval_items is base.get_eval_items and own.evaluate is base.evaluate
        if self.config.steps_per_eval > 0 and default and (found := len(await self.get_eval_items())) < wanted:
            raise RunStopped(
                f"evaluation would take all {found} items (env.eval_items is {wanted}) and leave none to train on: "
                "write get_eval_items, or set --env.eval_items lower or --env.steps_per_eval 0"
            )

    async def note_group(
        self, item: Any, item_key: str, tools: Sequence[Mapping[str, Any]], rollouts: Sequence[Rollout]
    ) -> None:
        """Count a group of `serve` for the next `wandb_log`."""
        group = await asyncio.to_thread(  # conversations of thousands of turns are copied
            group_record,
            environment=self.run_name,
            item=item,
            item_key=item_key,
            tools=tools,
            model=describe(self.server_configs),
            rollouts=rollouts,
            with_samples=False,
        )
        self._tracker.add(group)

    async def process_manager(self) -> RunResult:
        """`process`: play `total_steps` groups and write them down; continues what an earlier start left."""
        default = Path("data") / self.run_name / "groups.jsonl"
        files = RunFiles(Path(self.config.data_path_to_save_groups or default))
        self.process_mode = True
        async with self._tracker.tracking(self, job="process"), self.running():
            run = self._run(
                files=files,
                next_item=self.get_next_item,
                total=self.n_groups_to_process,
                group_size=self.group_size_to_process,
                evaluation=False,
            )
            return await run.run()

    async def _run_evaluate(self) -> Any:
        async with self._tracker.tracking(self, job="evaluate"), self.running():
            return await self.evaluate()

    async def evaluate(self, *args: Any, **kwargs: Any) -> RunResult:
        """Play the evaluation items once each and write `metrics.json` beside `samples.jsonl`."""
        items = iter(await self.get_eval_items())

        async def next_item() -> Any:
            return next(items, None)

        folder = Path(self.config.data_dir_to_save_evals or Path("data") / self.run_name / "eval")
        self.config.data_dir_to_save_evals = str(folder)
        started = time.time()
        run = self._run(
            files=RunFiles(folder / "samples.jsonl"),
            next_item=next_item,
            total=self.config.eval_items,
            group_size=1,
            evaluation=True,
        )
        result = await run.run()
        metrics = evaluation_metrics(result.summary)
        await self.evaluate_log(
            metrics,
            model_name=describe(self.server_configs),
            start_time=started,
            end_time=time.time(),
            generation_parameters={"temperature": self.config.eval_temperature},
            verbose=False,
        )
        self._tracker.log(metrics, self.curr_step)
        return result

    def _run(self, *, files: RunFiles, next_item: Any, total: int, group_size: int, evaluation: bool) -> ProcessRun:
        settings = {
            "environment": self.run_name,
            "model": describe(self.server_configs),
            "evaluation": evaluation,
            **self.config.about_content(evaluation=evaluation),
            "group_size": group_size,
        }
        if isinstance(self.server, TokenServer):
            settings["template_report"] = self.server.prompts.template_report.to_record()
        return ProcessRun(
            next_item=next_item,
            play=lambda item, key: self._play_group(item, key, group_size, evaluation),
            environment=self.run_name,
            model=describe(self.server_configs),
            files=files,
            settings=settings,
            total=total,
            concurrency=self.config.max_eval_workers if evaluation else self.max_num_workers,
            max_failed_groups=self.config.max_failed_groups,
            system=self.config.trajectory_system_prompt,
            console=self.console,
            on_group=None if evaluation else self._log_group,
        )

    async def _play_group(
        self, item: Any, item_key: str, group_size: int, evaluation: bool = False
    ) -> tuple[list[dict[str, Any]], list[Rollout]]:
        """The rollouts of one group, side by side; the tools are the same for all of them."""
        tools = self.tool_definitions()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.play_rollout(item, item_key, index, tools, evaluation=evaluation))
                for index in range(group_size)
            ]
        return tools, [task.result() for task in tasks]

    # Logging.

    async def _log_group(self, group: dict[str, Any]) -> None:
        self._tracker.add(group)
        self.curr_step += 1
        await self.wandb_log()

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Log what happened since the last call. Subclasses add to `wandb_metrics` and call this."""
        metrics = dict(wandb_metrics or {})
        metrics.update(training_metrics(self._tracker.take()))
        metrics.update(self.server.wandb_metrics())
        self._tracker.log(self.perf_stats(metrics), self.curr_step, prefix=self.wandb_prepend)


def _worker_seconds(config: HermesAgentEnvConfig) -> float | None:
    """Seconds of a rollout of `serve`: it ends itself before the group is given up."""
    given = [seconds for seconds in (config.rollout_timeout, config.worker_timeout) if seconds and seconds > 0]
    return min(given, default=None)


async def _prove_backend(backend: Backend, spec: SandboxSpec) -> None:
    """Find out now, and not after the first groups, that the sandboxes which are asked for cannot be made.

    Removes what killed runs have left behind, too.

    Raises:
        BackendUnavailable: what is missing, and the next step.
    """
    available = await backend.check()
    if not available.ok:
        raise BackendUnavailable(f"backend {backend.name!r}: {available.detail}; {available.fix}")
    try:
        for info in await backend.reap():
            log.warning("removed %s sandbox %s, left behind by run %s", info.backend, info.id, info.run_id or "unknown")
    except BackendError as error:
        log.warning("sandboxes that killed runs left behind could not be removed: %s", error)
    if spec != SandboxSpec(lifetime=spec.lifetime, env=spec.env, network=spec.network, labels=spec.labels):
        try:  # an image or a limit that was never tried
            sandbox = await backend.create(spec)
        except BackendUnavailable:
            raise
        except BackendError as error:  # it may pass by itself, and rollouts are retried
            log.warning("a first sandbox could not be made: %s", error)
        else:
            await sandbox.close()
