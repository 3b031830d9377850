"""The cost of a step of the embedded engine on the CPU, estimated before anything is sampled.

Memory is computed from the files of the model and the settings, and compared with that of the machine: a step that
cannot fit is refused. Time is measured: the model reads some tokens once, before the policy is served.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from backends.errors import SettingsError
from backends.text import counted, duration
from lachesis_tokens.prompts.model_folders import MADE, made_folder, model_folder
from lachesis_tokens.prompts.vocabulary import ANY_ROW
from lachesis_train.engine.limits import BATCH_TOKENS, FULL_IN_MEMORY, KEPT_TOKENS, LOGITS_AT_ONCE, MICRO_BATCH_TOKENS
from lachesis_train.tinker_sdk import Datum, Training
from lachesis_train.trainer.settings import Settings

SLOW_STEP: Final = 600.0
"""Seconds of gradients of one step above which there is a warning."""
READ_TOKENS: Final = 256
"""Tokens that the model reads to measure its speed."""
GRADIENTS_COST: Final = 4.0
"""Gradients of a sequence take the time of so many forward passes of `READ_TOKENS` tokens each. Measured with SmolLM2
on one core: 2.3 with 256 tokens, 3.5 with 1,024, 4.1 with 2,048; attention of longer ones costs more."""
PROGRAM_BYTES: Final = 500 << 20
"""A process that has loaded torch and transformers, and the trainer."""
GIB: Final = 1 << 30


@dataclass(frozen=True)
class Work:
    """The maximum amount of data in a step."""

    sequences: int
    tokens: int
    """Of the longest sequence."""
    steps: int

    @classmethod
    def of(cls, settings: Settings) -> Work:
        """The greatest step that the settings of a run with rollouts allow."""
        return cls(settings.env.sequences, settings.training.max_token_trainer_length - 1, settings.num_steps)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model of the Llama family, from its files. Sizes are numbers of values unless they say bytes."""

    parameters: int
    hidden: int
    intermediate: int
    layers: int
    queries: int
    keys: int
    """Values of the keys of one token in one layer, and of its values."""
    vocabulary: int
    context: int

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Raises OSError, ValueError or KeyError for files that are not those of such a model."""
        config: dict[str, Any] = orjson.loads((folder / "config.json").read_bytes())
        width = 4 if config.get("dtype", config.get("torch_dtype")) == "float32" else 2
        config = config.get("text_config") or config
        heads = int(config["num_attention_heads"])
        size = int(config.get("head_dim") or config["hidden_size"] // heads)
        return cls(
            parameters=sum(file.stat().st_size for file in folder.glob("*.safetensors")) // width,
            hidden=int(config["hidden_size"]),
            intermediate=int(config["intermediate_size"]),
            layers=int(config["num_hidden_layers"]),
            queries=heads * size,
            keys=int(config.get("num_key_value_heads") or heads) * size,
            vocabulary=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
        )


def memory_of_step(shape: ModelShape, settings: Settings, work: Work) -> int:
    """Bytes that the engine and the trainer hold at the peak of a step, within about a quarter.

    The number of sequences adds nothing: they go through the model in parts of `MICRO_BATCH_TOKENS`, of which one holds
    at least one sequence.
    """
    training = settings.training
    width = 2 if training.engine_dtype == "bfloat16" else 4
    tokens = min(max(MICRO_BATCH_TOKENS, work.tokens), work.tokens * work.sequences, shape.context)
    tokens = max(tokens, min(work.tokens, shape.context))
    trained = min(training.engine_lora_layers or shape.layers, shape.layers)
    if not (training.train_mlp or training.train_attn):
        trained = 0
    hidden, inner, rank = shape.hidden, shape.intermediate, training.lora_rank
    # What torch keeps of each token for the way back, found with SmolLM2 and with `tiny`.
    kept = trained * tokens * (15 * hidden + 6 * inner + 14 * rank) * width
    logits = 4 * 4 * min(LOGITS_AT_ONCE, tokens * shape.vocabulary)
    adapter = rank * (
        trained * training.train_attn * 2 * (2 * hidden + shape.queries + shape.keys)
        + trained * training.train_mlp * 3 * (hidden + inner)
        + training.train_unembed * (hidden + shape.vocabulary)
    )
    adapters = 4 * adapter * (4 + 4)  # with gradient and two moments; the newest versions that sample
    if training.engine_full_finetuning:  # beside the base model, without the inputs of adapters
        kept = trained * tokens * (9 * hidden + 4 * inner) * width
        adapters = 4 * shape.parameters * (4 + FULL_IN_MEMORY)
    sampled = min(BATCH_TOKENS, settings.env.group_size * tokens)
    cache = 2 * shape.layers * shape.keys * width * (sampled + min(KEPT_TOKENS, sampled))
    return PROGRAM_BYTES + shape.parameters * width + adapters + max(kept + logits, cache)


def check_memory(settings: Settings, work: Work | None = None, *, machine: int | None = None) -> None:
    """Nothing where a step fits into the memory of this machine, or where that cannot be known: other engines, a GPU,
    a model that has still to be made.

    Args:
        work: the greatest step; default: the greatest that the settings allow.
        machine: bytes of memory; default: what this process can have.

    Raises:
        SettingsError: it does not fit. Names the setting to change.
    """
    shape = _shape(settings)
    room = memory_of_machine() if machine is None else machine
    if shape is None or not room:
        return
    given = work or Work.of(settings)
    needed = memory_of_step(shape, settings, given)
    if needed <= room:
        return
    least = Work(given.sequences, MICRO_BATCH_TOKENS, given.steps)
    if given.tokens > MICRO_BATCH_TOKENS and memory_of_step(shape, settings, least) <= room:
        low, high = MICRO_BATCH_TOKENS, given.tokens  # the first fits, the second does not
        while high - low > 1:
            middle = (low + high) // 2
            fits = memory_of_step(shape, settings, Work(given.sequences, middle, given.steps)) <= room
            low, high = (middle, high) if fits else (low, middle)
        step = (
            f"lower training.max_token_trainer_length to {low + 1} or less (longer sequences are left out and counted)"
        )
    else:
        step = (
            "train fewer layers (training.engine_lora_layers), set training.engine_dtype to bfloat16 (both train "
            "adapters, without training.engine_full_finetuning), or train a smaller model (training.base_model)"
        )
    raise SettingsError(
        f"a step does not fit into the memory of this machine: with sequences of up to "
        f"{counted(given.tokens, 'token')} the embedded engine needs about {needed / GIB:.1f} GiB, and there are "
        f"{room / GIB:.1f} GiB. Next step: {step}, or train on a machine with more memory or on a GPU "
        "(training.engine_device)"
    )


async def forecast(training: Training, settings: Settings, work: Work | None = None) -> list[str]:
    """Lines for a person about the time of a step, measured; none for another engine or a GPU.

    Raises:
        EngineError: the engine failed.
    """
    shape = _shape(settings)
    if shape is None:
        return []
    given = work or Work.of(settings)
    ids = [place % 200 + 3 for place in range(min(READ_TOKENS, shape.context - 1) + 1)]
    datum = Datum(ids[:-1], ids[1:], {"weights": [0.0] * (len(ids) - 1)})
    begun = time.perf_counter()
    await training.forward([datum])
    reads = len(datum.tokens) / (time.perf_counter() - begun)
    tokens = given.sequences * min(given.tokens, shape.context)
    seconds, threads = max(1.0, tokens * GRADIENTS_COST / reads), settings.training.engine_threads
    size = f"{counted(given.sequences, 'sequence')} of {counted(given.tokens, 'token')}"
    rest = (
        f"on this CPU with {counted(threads, 'thread')}; it reads prompts at {reads:,.0f} tokens/s; memory up to about "
        f"{memory_of_step(shape, settings, given) / GIB:.1f} GiB"
    )
    if work is None:  # nobody knows yet how long the rollouts will be
        lines = [
            f"the longest step that the settings allow, {size}, would take about {duration(seconds)}; shorter rollouts "
            f"take less; {rest}"
        ]
        slow = "if a step takes too long, lower"
    else:
        lines = [
            f"{counted(given.steps, 'step')} of at most {size}: up to about {duration(seconds)} a step, "
            f"{duration(seconds * given.steps)} in all, {rest}"
        ]
        slow = (
            f"warning: a step may take {duration(seconds)}, too long to see whether anything is learned. To shorten "
            "it, lower"
        )
    if seconds > SLOW_STEP:
        processors = len(os.sched_getaffinity(0))
        more = f"raise training.engine_threads ({processors} processors are here), " if threads < processors else ""
        lines.append(
            f"{slow} training.max_token_trainer_length or the sequences of a step (env.batch_size), {more}train "
            "fewer layers (training.engine_lora_layers), a smaller model, or use a GPU (training.engine_device)"
        )
    return lines


def memory_of_machine(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes of memory and swap that this process can have, by the machine and by its control groups; 0: unknown."""
    try:
        lines = (proc / "meminfo").read_text(encoding="ascii").splitlines()
        fields = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        found = fields["MemTotal"] + fields.get("SwapTotal", 0)
    except (OSError, ValueError, IndexError, KeyError):
        return 0
    return min([found, *_limits(proc, groups)])


def _limits(proc: Path, groups: Path) -> Iterator[int]:
    """Limits of the control groups of this process, of either version, and of those above them."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = groups / "memory" if controllers else groups
        own = top / path.lstrip("/")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        for folder in (own, *own.parents):
            if not folder.is_relative_to(top):
                break
            try:
                yield int((folder / name).read_text(encoding="ascii"))
            except (OSError, ValueError):  # no such group here, or `max`
                continue


def rows_of_model(settings: Settings) -> int:
    """Rows of the embedding of the model that the embedded engine trains; `ANY_ROW` where that is not known."""
    shape = _shape(settings, any_device=True)
    return ANY_ROW if shape is None else shape.vocabulary


def _shape(settings: Settings, *, any_device: bool = False) -> ModelShape | None:
    """None where the model is not trained by the CPU of this machine, or where its files are none of ours to read."""
    from lachesis_train.tinker_sdk import is_configured

    if is_configured() or not (any_device or settings.training.engine_device.startswith("cpu")):
        return None
    name = settings.base_model
    if name in MADE and not (made_folder(name) / "config.json").is_file():
        return None  # it is made at the first use
    try:
        return ModelShape.of(model_folder(name))
    except (SettingsError, OSError, ValueError, KeyError):
        return None  # the engine says what is wrong with it
