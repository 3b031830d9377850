"""`process` and `eval`: one pipeline, with the sink and the pace of each."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from backends.errors import LachesisError, SettingsError
from backends.plugins import Registry, UnknownPlugin
from backends.text import counted
from lachesis.figures.costs import prices_of
from lachesis.figures.evaluations import EvaluatedItems
from lachesis.figures.item_keys import ItemKeys, SampleKeys, item_digest
from lachesis.figures.running_figures import RunningFigures
from lachesis.figures.summary import evaluation_metrics
from lachesis.loop.interrupted import interrupted_rollouts
from lachesis.loop.open_runs import open_run
from lachesis.loop.rollout import PlayedGroup
from lachesis.other_packages import VIEW
from lachesis.rewards.calls import in_call_scope
from lachesis.runs.decisions import Decision, Kept
from lachesis.runs.failures import FailureBrake
from lachesis.runs.file_sink import FileSink
from lachesis.runs.group_player import play_item, settled_group
from lachesis.runs.group_records import group_record
from lachesis.runs.own_code import code_of
from lachesis.runs.own_place import own_place
from lachesis.runs.pipeline import NextItem, Pipeline, PlayItem
from lachesis.runs.prose import print_prose
from lachesis.runs.reference_policy import player_of
from lachesis.runs.results import RunFiles, RunResult, program
from lachesis.runs.run_folder import data_folder, unused
from lachesis.settings.chosen import is_chosen
from lachesis.settings.hooks import of_hook
from lachesis.settings.server_settings import REFERENCE, ServerConfig, describe, is_local_model
from lachesis.settings.settings import HermesAgentEnvConfig
from lachesis_client.failed_requests import failed_requests
from lachesis_client.model_server import tracks_tokens
from lachesis_messages.records.entries import omitting

if TYPE_CHECKING:
    from lachesis.runs.environment import Environment

MODES: Registry[Callable[..., Awaitable[Any]]] = Registry("command", "lachesis.modes", {}, package="lachesis-train")
"""`serve`, which the package lachesis-train has."""


class EvaluationBroken(LachesisError, RuntimeError):
    """An evaluation ended whose metrics do not measure the model alone."""


async def process(env: Environment, *, hold_out: bool = False) -> RunResult:
    """Play and record `total_steps` groups; continues an earlier start.

    Args:
        hold_out: leave out the items that `get_eval_items` takes from `get_next_item`.
    """
    config = env.config
    logging = asyncio.Lock()

    async def on_group(group: PlayedGroup, decision: Decision) -> None:
        if isinstance(decision, Kept):
            await env.after_group(group)
            async with logging:  # groups that end at once are logged one by one, each at its own step
                if (tracker := env.tracker) is not None and tracker.on:
                    tracker.add(decision.content)
                env.curr_step += 1
                call = env.wandb_log()
                await of_hook(call if tracker is None else tracker.hook(call))
        elif (tracker := env.tracker) is not None and tracker.on and decision.record:
            tracker.add(decision.record)  # for the rates of not being scored, which the next log has

    async with tracking(env, "process"), env.running():
        next_item: NextItem = env.get_next_item
        if hold_out:
            from lachesis.runs.held_out import without_eval_items

            next_item = await without_eval_items(env)
        return await _into_files(
            env,
            RunFiles(Path(config.data_path_to_save_groups or data_folder(env.run_name) / "groups.jsonl")),
            named=config.data_path_to_save_groups is not None,
            next_item=next_item,
            total=env.n_groups_to_process,
            wanted_items=env.n_groups_to_process,
            workers=env.max_num_workers,
            group_size=env.group_size_to_process,
            on_group=on_group,
            tracker=env.tracker,
        )


async def evaluate_alone(env: Environment) -> Any:
    """`eval` as a command: whatever the environment's own method returns. Raises as `own_evaluation`."""
    folder = env.config.data_dir_to_save_evals
    if folder is not None and env.evaluates_itself:
        from lachesis.runs.own_figures import write_settings

        if Path(folder, "metrics.json").exists():
            place = env.config.data_dir_to_save_evals = str(unused(Path(folder)))
            note(env.console, f"{folder} contains another evaluation; this one is in {place}")
        write_settings(env.config, env.server_configs)
    async with tracking(env, "evaluate"), env.running():
        return await own_evaluation(env)


async def own_evaluation(env: Environment) -> Any:
    """`env.evaluate()`, which in an environment's own code may make loops and contexts by hand.

    Raises:
        EvaluationBroken: the infrastructure failed in one of these loops, or the model server a request of this code,
            even if the environment caught that.
        BackendError: it failed in one of these contexts.
    """
    if not env.evaluates_itself:
        return await of_hook(env.evaluate())
    from lachesis.runs.own_figures import own_figures

    of_tasks = open_run().failures
    of_tasks.clear()
    with failed_requests() as failed, own_figures(env.reporting) as figures:
        runs = env.tool_context_class().runs
        result = await of_hook(in_call_scope(env.evaluate(), name=f"{env.run_name}: evaluate", runs=runs))
    # A loop made by hand notes the error of its request again.
    if broken := list({id(error): error for error in (*failed.values(), *of_tasks.values())}.values()):
        raise EvaluationBroken(
            f"{env.run_name}: the infrastructure failed {counted(len(broken), 'time')} during its evaluation; "
            f"the results may count that as failures of the model; the first error: {broken[0]}"
        )
    if isinstance(result, RunResult):
        return result  # it printed and wrote its own
    if left := figures.left(env.reporting, result):
        await env.reporting.evaluate_log(left)
    elif not figures.written:
        note(env.console, f"{env.run_name}: evaluate() returned no metrics: nothing is written")
    return result


async def evaluate(env: Environment) -> RunResult:
    """Play `eval_samples` samples of each evaluation item and write `metrics.json` next to `samples.jsonl`.

    Samples are groups of one rollout, so that `max_eval_workers` bounds rollouts, a second start plays exactly those
    that are missing, and a long one holds no other up. All items come before the second sample of the first one.
    """
    config = env.config
    items = list(await of_hook(env.get_eval_items()))[: config.eval_items]
    digests = await asyncio.to_thread(lambda: [item_digest(item) for item in items])
    samples = iter(items * config.eval_samples)
    _choose_temperature(env)

    async def next_item() -> Any:
        return next(samples, None)

    started = time.time()
    result = await _into_files(
        env,
        RunFiles(Path(config.data_dir_to_save_evals or data_folder(env.run_name) / "eval") / "samples.jsonl"),
        named=config.data_dir_to_save_evals is not None,
        next_item=next_item,
        total=len(items) * config.eval_samples,
        workers=config.max_eval_workers,
        group_size=1,
        keys=SampleKeys(digests),
        evaluation=EvaluatedItems(digests, config.eval_category),
        wanted_items=config.eval_items if len(items) < config.eval_items else 0,
    )
    config.data_dir_to_save_evals = str(result.files.groups.parent)
    metrics = evaluation_metrics(result.summary)
    await env.evaluate_log(
        metrics,
        model_name=describe(env.server_configs),
        start_time=started,
        end_time=time.time(),
        generation_parameters={"temperature": config.eval_temperature},
        verbose=False,
    )
    if env.tracker is not None:
        env.tracker.log(metrics, env.curr_step)
    return result


def _choose_temperature(env: Environment) -> None:
    """Several samples of an item differ: they have the temperature of the agent where none was chosen for them."""
    config = env.config
    samples_nothing = all(server.model_name == REFERENCE for server in env.server_configs)
    if config.eval_samples == 1 or samples_nothing:
        return
    chosen = is_chosen(config, "eval_temperature")
    if not chosen:
        config.eval_temperature = config.agent_temperature
    said = f"{config.eval_samples} rollouts of each item, at temperature {config.eval_temperature:g}"
    if not config.eval_temperature:
        said = f"note: {said}, at which they are mostly identical; --env.eval_temperature sets it"
        print_prose(env.console, said, style="yellow")
    elif not chosen:
        print_prose(env.console, f"{said} (env.agent_temperature; --env.eval_temperature sets it)")


async def _into_files(
    env: Environment,
    files: RunFiles,
    *,
    named: bool,
    next_item: NextItem,
    total: int,
    workers: int,
    group_size: int,
    keys: ItemKeys | None = None,
    wanted_items: int,
    evaluation: EvaluatedItems | None = None,
    on_group: Callable[[PlayedGroup, Decision], Awaitable[None]] | None = None,
    tracker: Any = None,
) -> RunResult:
    """Play, and write everything next to the groups file.

    Args:
        named: somebody chose the folder. Otherwise a run with other settings than the one there gets the next free one.
    """
    config = env.config
    await asyncio.to_thread(importlib.import_module, "numpy")  # of the first figures: not while rollouts wait
    started = time.monotonic()
    evaluates = evaluation is not None
    settings = {**about_content(env, evaluation=evaluates), "evaluation": evaluates, "group_size": group_size}
    if evaluates and any(map(is_local_model, env.server_configs)):
        from lachesis.runs.model_servers import model_files

        settings["model_file"] = await asyncio.to_thread(_content_of, model_files(env.server_configs))
    code = await asyncio.to_thread(code_of, env)
    files, takes_old_code = await own_place(
        files, settings, evaluation.digests if evaluation else (), code, named, config.when_code_changed, env.console
    )
    if not named:  # for what the environment itself keeps of its rollouts
        place = files.groups.parent if evaluates else files.groups
        setattr(config, "data_dir_to_save_evals" if evaluates else "data_path_to_save_groups", str(place))
    figures = RunningFigures(window=None) if evaluates else RunningFigures()
    sink = FileSink(
        files,
        environment=env.run_name,
        model=player_of(env.server, env.server_configs),
        settings=settings,
        total=total,
        workers=workers,
        system=config.trajectory_system_prompt,
        save_trajectories=config.save_trajectories,
        min_reward=config.trajectory_min_reward,
        console=env.console,
        size=group_size,
        figures=figures,
        evaluation=evaluation,
        on_earlier=None if tracker is None else tracker.exclusions.add_group,
        code=code,
        takes_old_code=takes_old_code,
        prices=prices_of(env.server_configs),
    )
    # A sample is a rollout, and no group: as many may fail as in these groups.
    most = config.max_failed_groups * (config.group_size if evaluates else 1)
    brake = FailureBrake(env.console, most, figures.causes)
    play = partial(play_item, env, size=group_size, evaluation=evaluates, finished=figures.add)
    pipeline = Pipeline(
        title=env.run_name,
        next_item=next_item,
        keys=keys or ItemKeys(),
        play=_keeping_interrupted(play, sink),
        sink=sink,
        console=env.console,
        brake=brake,
        on_played=None if tracker is None else lambda group: tracker.count(group.item_key, group.rollouts),
        on_group=on_group,
        ask_again=partial(settled_group, env, figures.add),
    )
    try:
        await pipeline.run()
    except asyncio.CancelledError:
        folder = shlex.quote(str(sink.files.groups.parent))
        print_prose(env.console, f"look at what is finished: {program()} view {folder}")
        raise
    assert sink.summary is not None
    return RunResult(
        files=sink.files,
        summary=sink.summary,
        played=sink.played,
        seconds=time.monotonic() - started,
        tokens=sink.tokens,
        failed_groups=sink.failed_groups,
        figures=figures,
        exceptions=brake.exceptions,
        exhausted=pipeline.exhausted,
        short_of=wanted_items if evaluates or pipeline.exhausted else 0,
        declined=sink.declined,
        left_to_agents=sink.left_to_agents,
        requested=None if evaluation is None else len(evaluation.digests),
        min_reward=config.trajectory_min_reward,
        omitting=await asyncio.to_thread(lambda: (omitting(sink.files.samples), omitting(sink.files.failed_samples))),
        evaluation=evaluates,
    )


def _keeping_interrupted(play: PlayItem[PlayedGroup], sink: FileSink) -> PlayItem[PlayedGroup]:
    async def played(item: Any, key: str) -> Sequence[PlayedGroup]:
        with interrupted_rollouts() as interrupted:
            try:
                return await play(item, key)
            except asyncio.CancelledError:
                await sink.keep_interrupted(item, interrupted)
                raise

    return played


@asynccontextmanager
async def tracking(env: Environment, job: str) -> AsyncIterator[None]:
    """A W&B run around the block if the settings ask for one, to which `env.tracker` sends.

    Raises:
        UnknownPlugin: the package that logs to W&B is not installed.
        TrackingError: no login; says how to log in, or to do without.
    """
    if not env.config.use_wandb:
        yield
        return
    env.tracker = VIEW.load("tracker")()
    project, group = env.wandb_project or env.run_name, env.wandb_group
    async with env.tracker.tracking(env.config, project=project, group=group, job=job):
        yield


async def serve(env: Environment, *, hold_out: bool) -> Any:
    """Play groups for a trainer; see `lachesis_train.serving.serve`.

    Raises:
        UnknownPlugin: the package that can is not installed.
    """
    try:
        run = MODES.load("serve")
    except UnknownPlugin as error:
        raise SettingsError("`serve` needs lachesis-train. Next step: pip install lachesis-train") from error
    return await run(env, hold_out=hold_out)


def record_of(env: Environment, group: PlayedGroup, *, with_samples: bool = True) -> dict[str, Any]:
    return group_record(
        group, environment=env.run_name, model=player_of(env.server, env.server_configs), with_samples=with_samples
    )


def about_content(env: Environment, *, evaluation: bool) -> dict[str, Any]:
    """The settings that decide what a run writes or sends: a second start must have the same."""
    settings = {
        "environment": env.run_name,
        "model": describe(env.server_configs),
        **env.config.about_content(evaluation=evaluation),
        **_about_servers(env.server_configs),
    }
    if tracks_tokens(env.server):
        settings["tokenizer"] = env.server.tokenizer_proof.to_record()
        settings["template_report"] = env.server.prompts.template_report.to_record()
    return settings


def _about_servers(configs: Sequence[ServerConfig]) -> dict[str, Any]:
    """How the servers sample. Not where they are, how many or with which key: these may change between starts."""
    names = ("server_type", "engine", "extra_body")
    kinds: list[tuple[Any, ...]] = []
    for config in configs:
        kind = (config.model_name, *(getattr(config, name) or None for name in names))
        if kind not in kinds:
            kinds.append(kind)
    return {f"openai.{name}": [kind[at] for kind in kinds] for at, name in enumerate(names, 1)}


def _content_of(files: Sequence[Path]) -> list[str]:
    """Digests of the content of the files."""
    digests = []
    for path in files:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest()[:16])
    return digests


def note(console: Console, text: str) -> None:
    print_prose(console, f"note: {text}", style="yellow")


def longest_group(config: HermesAgentEnvConfig) -> float:
    """Seconds that a group may take if each of its rollouts ends itself in time, replays included; -1 for any."""
    if config.worker_timeout <= 0:
        return -1.0
    own = 3 * config.worker_timeout + config.setup_timeout + config.reward_timeout  # see `RolloutClock`
    rollouts = own * (1 + config.max_infra_retries)
    return float(rollouts + config.reward_timeout)  # the group's own reward comes last
