"""`lachesis train --sft FILE...`: train a model on what `process` wrote."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from backends.errors import ExitCode, SettingsError
from lachesis_train.sft.settings import SftSettings
from lachesis_train.trainer.settings import Settings
from lachesis_train.verbs.training_parts import LazyTokenizer, engine, new_recorder, serving, stop_at_signals

if TYPE_CHECKING:
    from lachesis_train.curves.recorder import TrainingRecorder
    from lachesis_train.sft.readers import Dataset


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


def _read(settings: Settings, sft: SftSettings, files: Sequence[str], tokenizer: LazyTokenizer) -> Dataset:
    from lachesis_client.errors import TemplateError
    from lachesis_tokens.prompts.dataset_prompts import DatasetPrompts
    from lachesis_tokens.templates.chat_template import read_template
    from lachesis_train.sft.readers import ReadRules, read_dataset

    try:
        template = None if sft.chat_template is None else read_template(sft.chat_template)
        prompts = DatasetPrompts(tokenizer.get(), chat_template=template)
    except (OSError, ValueError, TemplateError) as error:
        raise SettingsError(f"{error}; set --sft.chat_template FILE.jinja") from error
    rules = ReadRules(
        max_token_len=settings.training.max_token_trainer_length,
        completed_only=sft.completed_only,
        min_reward=sft.min_reward,
        keep_reasoning=sft.reasoning == "keep",
    )
    return read_dataset(files, prompts, rules)
