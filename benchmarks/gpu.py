"""The embedded engine on a GPU, beside plain transformers in the same run.

    python -m benchmarks.gpu [--only logprobs sampling training contexts curve] [--json FILE]

`logprobs`: those of the sampler against those of the trainer, with two controls that must differ: the trainer one step
later, and logprobs moved by one token. Beside them the same comparison for `generate` and a forward pass. `sampling`
and `training`: tokens a second beside `generate` and a plain loop. `contexts`: time and memory of a step on one long
sequence. `curve`: `lachesis train` on `tool_call`, and its control. The exit code is 1 where a comparison fails.
Without a GPU it says so and ends; `--device cpu --model tiny --small` rehearses all but the curve on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_sides import Engine, Plain
from benchmarks.training_step import batch

DTYPES = ("bfloat16", "float32")
PARTS = ("logprobs", "sampling", "training", "contexts", "curve")
LEARNING_RATE = 5e-4
CONTROL_FACTOR = 3.0
"""How many times the divergence of the same weights a control must show at least."""
EXACT = 1e-3
"""Largest difference in float32 between sampler and trainer."""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...] = (1, 16, 64)
    new_tokens: int = 64
    groups: tuple[int, ...] = (4, 16)
    contexts: tuple[int, ...] = (8192, 32768)
    rounds: int = 3


SMALL = Sizes((1, 4), 8, (1, 2), (256, 5000), 1)


@dataclass(frozen=True)
class Figure:
    """One line of the table."""

    part: str
    dtype: str
    case: str
    lachesis: Mapping[str, float]
    plain: Mapping[str, float] | None
    note: str = ""
    failed: bool = False

    def cells(self) -> list[str]:
        """Of the table."""
        note = f"{'FAILED ' * self.failed}{self.note}"
        return [self.part, self.dtype, self.case, _shown(self.lachesis), _shown(self.plain), note]


class Benchmark:
    """All parts, on one device with one model."""

    def __init__(self, folder: Path, device: str, sizes: Sizes) -> None:
        self.folder = folder
        self.device = device
        self.sizes = sizes
        self.cuda = device.startswith("cuda")

    def prompts(self, count: int) -> list[list[int]]:
        """Chats of different lengths."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.folder)
        asked = [f"Explain {'very ' * (number % 8)}shortly why {number} is not prime." for number in range(count)]
        chats = [[{"role": "user", "content": text}] for text in asked]
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
        return [tokenizer.encode(text, add_special_tokens=False) for text in texts]

    def seconds(self, *works: Callable[[], Any]) -> list[list[float]]:
        """Of pieces of work that alternate; a first round warms up."""
        taken: list[list[float]] = [[] for _ in works]
        for number in range(self.sizes.rounds + 1):
            for place, work in enumerate(works):
                self.wait()
                begun = time.perf_counter()
                work()
                self.wait()
                if number:
                    taken[place].append(time.perf_counter() - begun)
        return taken

    def wait(self) -> None:
        """Until the device has nothing to do."""
        import torch

        if self.cuda:
            torch.cuda.synchronize()

    def logprobs(self, dtype: str) -> Iterator[Figure]:
        """Sampler against trainer, with the controls, and plain transformers against itself."""
        import numpy as np

        engine, prompts = Engine(self.folder, dtype, self.device), self.prompts(self.sizes.batches[-1])
        length = self.sizes.new_tokens

        def sampled() -> tuple[list[Any], Any]:
            sequences = engine.sample(prompts, length)
            rows = []
            for number, (prompt, one) in enumerate(zip(prompts, sequences, strict=True)):
                masked = [0.0] * (len(prompt) - 1)
                rows.append(([*prompt, *one.tokens], [*masked, *one.logprobs], [*masked, *[(-1.0) ** number] * length]))
            return rows, np.array([one.logprobs for one in sequences])

        def trainers(rows: Sequence[Any]) -> Any:
            return np.array([each[-length:] for each in engine.forward_backward(rows, forward_only=True).logprobs])

        for _ in range(3):
            engine.step(sampled()[0], LEARNING_RATE)
        plain = Plain(str(self.folder), batch(1, 1), None, dtype=dtype, device=self.device)
        plain.take(engine)
        rows, old = sampled()
        same = trainers(rows) - old
        moved = trainers(rows)[:, :-1] - old[:, 1:]
        engine.step(rows, LEARNING_RATE)
        later = trainers(rows) - old
        ours, theirs = _differences(same), _differences(plain.difference(prompts, length))
        inexact = dtype == "float32" and float(np.abs(same).max()) > EXACT
        yield Figure("logprobs", dtype, "same weights", ours, theirs, f"{same.size} tokens", inexact)
        for case, control in (("control: one step later", later), ("control: one token later", moved)):
            found = _differences(control)
            small = found["KL"] < CONTROL_FACTOR * ours["KL"]
            yield Figure("logprobs", dtype, case, found, None, "must differ", small)

    def sampling(self, dtype: str) -> Iterator[Figure]:
        """Tokens a second of all rows."""
        engine = Engine(self.folder, dtype, self.device)
        plain = Plain(str(self.folder), batch(1, 1), None, dtype=dtype, device=self.device)
        for adapter in (True, False):
            for count in self.sizes.batches:
                prompts, length = self.prompts(count), self.sizes.new_tokens
                taken = self.seconds(
                    lambda: engine.sample(prompts, length, adapter=adapter),  # noqa: B023
                    lambda: plain.generate(prompts, length, adapter=adapter),  # noqa: B023
                )
                case = f"{'adapter' if adapter else 'base'}, {count} at once"
                yield _rates("sampling", dtype, case, count * length, taken)

    def training(self, dtype: str) -> Iterator[Figure]:
        """Tokens a second of gradients and Adam, on groups of 8 that share a prompt."""
        for groups in self.sizes.groups:
            rows = batch(groups, 8)
            engine = Engine(self.folder, dtype, self.device)
            plain = Plain(str(self.folder), rows, None, dtype=dtype, device=self.device)
            taken = self.seconds(lambda: engine.step(rows), plain.step)  # noqa: B023
            tokens = sum(len(row[0]) - 1 for row in rows)
            yield _rates("training", dtype, f"{len(rows)} sequences, {tokens} tokens", tokens, taken)

    def contexts(self, dtype: str) -> Iterator[Figure]:
        """A step on one sequence, each token of it trained."""
        import numpy as np

        for length in self.sizes.contexts:
            tokens = np.random.default_rng(0).integers(0, 256, length + 1).tolist()
            row = (tokens, [-5.0] * length, [1.0] * length)
            with tempfile.TemporaryDirectory() as made:
                folder = _longer(self.folder, length, Path(made))

                def ours(folder: Path = folder, row: Any = row) -> Callable[[], Any]:
                    engine = Engine(folder, dtype, self.device)
                    return lambda: engine.step([row])

                def theirs(folder: Path = folder, row: Any = row) -> Callable[[], Any]:
                    return Plain(str(folder), [row], None, dtype=dtype, device=self.device).step

                yield Figure("contexts", dtype, f"{length} tokens", self.peak(ours), self.peak(theirs))

    def peak(self, make: Callable[[], Callable[[], Any]]) -> dict[str, float]:
        """Seconds of the work that is made, and GiB of the device at its peak; nothing where it does not fit."""
        import torch

        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            (taken,) = self.seconds(make())
        except torch.OutOfMemoryError:
            return {}
        memory = {"GiB": torch.cuda.max_memory_allocated() / 2**30} if self.cuda else {}
        return {"seconds": statistics.median(taken), **memory}

    def curve(self, dtype: str) -> Iterator[Figure]:
        """The demonstration of training through all processes: rate of whole calls, before and after."""
        from benchmarks.learning_curves import CONTROL, TRAINED, Curve, conclude
        from benchmarks.train_demo import run

        where, settings = Path("data/train/gpu"), {"env": "tool_call", "seed": 0, "steps": 18, "items": 64}
        flags = ("--training.engine_device", self.device, "--training.engine_dtype", dtype)
        curves: list[Curve] = []
        for name in (TRAINED, CONTROL):
            curves += run(name, where / name.split()[0], settings, None, *flags)
        conclude(curves, where / "reward.svg")
        for curve in curves:
            rates = {
                f"{when} {name}".strip(): value
                for when, rate in zip(("before", "after"), curve.whole, strict=True)
                for name, value in (("", rate.mean), ("low", rate.low), ("high", rate.high))
            }
            wrong = curve.learned == (curve.name == CONTROL)
            yield Figure("curve", dtype, curve.name, rates, None, f"{curve.seconds:.0f} s", wrong)


def _shown(figures: Mapping[str, float] | None) -> str:
    if figures is None:
        return ""
    texts = (f"{name} {value:,.0f}" if value >= 100 else f"{name} {value:.2g}" for name, value in figures.items())
    return ", ".join(texts) or "does not fit"


def _differences(found: Any) -> dict[str, float]:
    """Largest and mean of absolute differences of logprobs, and the KL divergence that they estimate."""
    import numpy as np

    sizes, divergence = np.abs(found), np.expm1(found.astype(float)) - found
    return {"max": float(sizes.max()), "mean": float(sizes.mean()), "KL": float(divergence.mean())}


def _rates(part: str, dtype: str, case: str, tokens: int, taken: Sequence[Sequence[float]]) -> Figure:
    ours, theirs = (
        {"tokens/s": tokens / statistics.median(each), "low": tokens / max(each), "high": tokens / min(each)}
        for each in taken
    )
    return Figure(part, dtype, case, ours, theirs, f"ratio {ours['tokens/s'] / theirs['tokens/s']:.2f}")


def _longer(folder: Path, length: int, made: Path) -> Path:
    """The folder of a model that takes `length` positions, the same but for that limit."""
    config = json.loads((folder / "config.json").read_text())
    if config["max_position_embeddings"] >= length:
        return folder
    for file in folder.iterdir():
        (made / file.name).symlink_to(file)
    (made / "config.json").unlink()
    (made / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    return made


def main() -> int:
    """The command line; 1 where a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    add("--dtype", nargs="+", choices=DTYPES, default=DTYPES)
    add("--device", default="cuda")
    add("--model", default="smollm2")
    add("--small", action="store_true", help="a few tokens, to see that all runs; without the curve")
    add("--json", type=Path, help="a file that gets the figures")
    given = parser.parse_args()
    try:
        import peft
        import torch
        import transformers
    except ImportError as error:
        print(f"gpu: skipped, {error.name} is not installed")
        return 0
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"gpu: skipped, torch {torch.__version__} sees no GPU")
        return 0
    from rich.console import Console
    from rich.table import Table

    from lachesis_tokens.prompts.model_folders import model_folder

    benchmark = Benchmark(model_folder(given.model), given.device, SMALL if given.small else Sizes())
    card = torch.cuda.get_device_name(given.device) if benchmark.cuda else given.device
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    print(f"{card}, {given.model}, {', '.join(f'{name} {version}' for name, version in versions.items())}", flush=True)
    figures: list[Figure] = []
    for part in given.only:
        for dtype in given.dtype[:1] if part == "curve" else given.dtype:
            for figure in () if given.small and part == "curve" else getattr(benchmark, part)(dtype):
                figures.append(figure)
                print(" | ".join(figure.cells()), flush=True)
    table = Table("part", "dtype", "case", "Lachesis", "plain transformers", "", box=None)
    for one in figures:
        table.add_row(*one.cells())
    Console(width=200).print(table)
    record = {"card": card, "model": given.model, "versions": versions, "figures": [asdict(one) for one in figures]}
    if given.json:
        given.json.write_text(json.dumps(record, indent=1), encoding="utf-8")
    print(json.dumps(record))
    return int(any(one.failed for one in figures))


if __name__ == "__main__":
    sys.exit(main())
