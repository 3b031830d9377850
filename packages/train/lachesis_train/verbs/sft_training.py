"""`lachesis train --sft FILE...`: train a model on what `process` wrote."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Console

from backends.errors import ExitCode, SettingsError
from lachesis_train.sft.settings import SftSettings
from lachesis_train.trainer.settings import Settings
from lachesis_train.verbs.training_parts import LazyTokenizer, engine, new_recorder, serving, stop_at_signals

if TYPE_CHECKING:
    from lachesis_train.curves.recorder import TrainingRecorder
    from lachesis_train.sft.readers import Dataset
    from lachesis_train.trainer.engine_link import EngineLink


_OF_WARM_START: Final = {"completed_only": False, "min_reward": 1.0, "validation_share": 0.0, "batch_size": 8}
"""Settings of `sft:` for examples of a reference policy, where none are given: what earned full marks is right, whether
the environment or the policy ended it."""


async def train_on_files(
    settings: Settings, sft: SftSettings, files: Sequence[str], console: Console, *, resume: bool, serve: bool
) -> int:
    """Train, and serve the result if asked to; the exit code: 0 once all steps are in the weights."""
    from lachesis_train.sft.loop import SftRun
    from lachesis_train.trainer.checkpoints import alone_in

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    def recorder(first: int, last: int) -> TrainingRecorder:
        return new_recorder(settings.model_copy(update={"num_steps": last}), first, tokenizer, console)

    stop, tokenizer = asyncio.Event(), LazyTokenizer(settings)
    dataset = await asyncio.to_thread(_read, settings, sft, files, tokenizer)
    say(dataset.summary())
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(alone_in(settings.run_dir))
        link = await stack.enter_async_context(engine(settings))
        run = SftRun(settings, sft, dataset, link, recorder=recorder, resume=resume, say=say, stop=stop)
        stop_at_signals(stop, say)
        steps = await run.run()
        say(
            f"{steps} of {run.last_step} steps are in the weights ({run.sampler}); checkpoint, metrics and report are "
            f"in {settings.run_dir}"
        )
        if serve and not stop.is_set():
            async with serving(settings, await run.policy(), tokenizer, say):
                await stop.wait()
    return 0 if steps >= run.last_step else ExitCode.STOPPED


async def warm_start(
    settings: Settings,
    sft: SftSettings,
    link: EngineLink,
    tokenizer: LazyTokenizer,
    console: Console,
    stop: asyncio.Event,
) -> bool:
    """Fine-tune on the examples in the run's folder, which its reference policy played; whether it came to an end.

    The run that follows begins with these weights, and with a new optimizer. What was fine-tuned before is not again.
    """
    from lachesis_train.sft.loop import SftRun

    def say(text: str) -> None:
        console.print(f"warm start: {text}", markup=False, highlight=False, soft_wrap=True)

    def recorder(first: int, last: int) -> TrainingRecorder:
        return new_recorder(own.model_copy(update={"num_steps": last}), first, tokenizer, console)

    folder = settings.warm_start_dir
    files = sorted(str(path) for path in folder.rglob("groups.jsonl") if path.is_file())
    if not files:
        raise SettingsError(
            f"training.warm_start is {settings.training.warm_start}, and {folder} has no examples: start with "
            "`lachesis train --env NAME --warm-start N`, which has the environment play them, or set it to 0"
        )
    # The schedule of the learning rate is that of the steps on batches.
    changed = {"warmup_steps": 0, "learning_rate_schedule": "constant", "num_steps": None, "warm_start": 0}
    changed |= {"name": f"{settings.training.name}-warm-start", "run_dir": str(folder)}
    own = settings.model_copy(update={"training": settings.training.model_copy(update=changed)})
    sft = sft.model_copy(
        update={name: value for name, value in _OF_WARM_START.items() if name not in sft.model_fields_set}
    )
    dataset = await asyncio.to_thread(_read, own, sft, files, tokenizer)
    say(dataset.summary())
    run = SftRun(own, sft, dataset, link, recorder=recorder, say=say, stop=stop)
    steps = await run.run()
    await run.close()
    return steps >= run.last_step


def _read(settings: Settings, sft: SftSettings, files: Sequence[str], tokenizer: LazyTokenizer) -> Dataset:
    from lachesis_client.errors import TemplateError
    from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
    from lachesis_tokens.templates.chat_template import read_template
    from lachesis_train.sft.readers import read_dataset

    try:
        template = None if sft.chat_template is None else read_template(sft.chat_template)
        prompts = DatasetPrompts(tokenizer.get(), chat_template=template)
    except (OSError, ValueError, TemplateError) as error:
        raise SettingsError(f"{error}; set --sft.chat_template FILE.jinja") from error
    return read_dataset(files, prompts, sft, max_token_len=settings.training.max_token_trainer_length)
