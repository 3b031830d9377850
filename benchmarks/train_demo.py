"""`make train-demo`: a model of 135 million parameters learns to call tools; with shuffled rewards it does not.

    python -m benchmarks.train_demo [--env tool_call|tool_result|maze|both] [--steps N] [--control-steps N] [--trees N]
                                    [--seed N ...] [--teacher RUN_DIR --distilled-steps N] [--run-dir DIR]
                                    [--threads N]

Each run is `lachesis train --env tool_call`, or with `--env tool_result` or `maze` that of a task of two turns or of
five, after a warm start. The model before and after it plays the same held-out items, once each at temperature 1, as in
training. With `--trees N` another run, from the same warm start, has rollouts that branch, and larger groups, so that a
step samples about as many tokens. In the control run the rewards of a batch are permuted among its rollouts, and all
else is the same. With --teacher one more run learns from the model of an earlier one, without rewards. `--env both`
trains two tasks in one run, without a control, and has a line for each. Prints both rates of right answers, of those
that are whole and of those that the parser reads, and writes reward.svg, over the tokens that were sampled, also for
groups without a signal.
A run that has finished in its folder with the same arguments is not repeated, and one that was cut off, or had fewer
steps, goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.learning_curves import CONTROL, DISTILLED, TRAINED, TREES, Answer, Curve, conclude, kept
from lachesis.runs.command_line import read_settings
from lachesis_envs.maze import MazeEnv
from lachesis_envs.tool_call import ToolCallEnv, ToolResultEnv
from lachesis_messages.records.groups import read_groups
from lachesis_tokens.prompts.model_folders import model_folder
from lachesis_train.outbox_state import DELIVERED
from lachesis_train.verbs.policy import engine_of, served

CONFIGS = Path(__file__).parents[1] / "configs"
CLASSES: Mapping[str, Any] = {"tool_call": ToolCallEnv, "tool_result": ToolResultEnv, "maze": MazeEnv}
SUFFIXES = {TRAINED: "", TREES: "-trees", CONTROL: "-control", DISTILLED: "-distilled"}
BOTH, OF_BOTH = "both", ("tool_call", "tool_result")
CONTROLS = Path(__file__).with_name("shuffled_rewards.py")
MASKED = -100
FORKS = {"tool_result": "turns:2", "maze": "turns:2,4"}
OF_TREES = ("--env.group_size", "12", "--env.batch_size", "48")
"""Of both tasks. By the number of turns that are sampled, a step is about as long as one of 32 plain rollouts."""
OF_TEACHER = ("--training.reward_weight", "0", "--training.learning_rate", "0.0005", "--training.grad_clip_norm", "0.5")
"""The first gradients, of tokens that the teacher finds nearly impossible, are cut: they would set Adam's scale.
With the settings of the other runs, 6 steps did not raise the rate."""


def main() -> int:
    """Run all; 1 if a model has not learned or a control has."""
    parser = _parser()
    given = parser.parse_args()
    if given.trees and given.env not in FORKS:
        parser.error(f"--trees needs a task of several turns: --env {' or '.join(FORKS)}")
    if given.trees and not given.steps:
        parser.error("--trees begins with the warm start of the run with plain groups: give --steps too")
    curves: list[Curve] = []
    for seed in given.seed:
        distilled = given.distilled_steps if given.teacher else 0
        control = given.control_steps if given.env != BOTH else 0
        runs = ((TRAINED, given.steps), (TREES, given.trees), (CONTROL, control), (DISTILLED, distilled))
        for name, steps in runs:
            folder = given.run_dir / f"seed-{seed}{SUFFIXES[name]}"
            if steps:
                settings = {"env": given.env, "seed": seed, "steps": steps, "items": given.items}
                first = curves[-1] if name == TREES else None
                curves += run(name, folder, settings, given.teacher, threads=given.threads, first=first)
                print(f"{name}, seed {seed}: report, with the rollouts of each step: {folder / 'report.html'}")
    return conclude(curves, given.run_dir / "reward.svg")


@contextmanager
def teacher(run_dir: Path) -> Iterator[Sequence[str]]:
    """Serves the model of an earlier run; the arguments of `lachesis train` that make it the teacher."""
    command = [sys.executable, "-m", "lachesis", "policy", "--run-dir", str(run_dir), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            yield ("--training.teacher_url", url, *OF_TEACHER)
        finally:
            server.terminate()


def run(
    name: str,
    folder: Path,
    settings: Mapping[str, Any],
    teacher_dir: Path | None = None,
    *flags: str,
    threads: int = 2,
    first: Curve | None = None,
) -> list[Curve]:
    """Train in the folder, then play the held-out items with the model that it began with, and with the last one.

    Args:
        flags: more arguments of `lachesis train`.
        first: of the run with plain groups, from whose warm start one with trees goes on.

    Returns:
        A curve for each environment.
    """
    env = settings["env"]
    places = {each: folder / each for each in OF_BOTH} if env == BOTH else {env: folder}
    found = [kept(place, {**settings, "env": each}) for each, place in places.items()]
    done = [curve for curve in found if curve is not None]
    if len(done) == len(places):
        return done
    begun, about = folder / "demo.json", json.dumps({**settings, "steps": None, "name": name})
    if not begun.exists() or begun.read_text() != about:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        begun.write_text(about)
    control = f"{CONTROLS}:Shuffled{CLASSES[env].__name__}" if name == CONTROL else env
    target = ("--env", control) if env != BOTH else ()
    command = [sys.executable, "-m", "lachesis", "train", *target, "--config", str(_config(env))]
    run_flags = ("--training.run_dir", str(folder), "--training.num_steps", str(settings["steps"]))
    seed = ("--env.dataset_seed", str(settings["seed"]), "--training.lora_seed", str(settings["seed"]))
    own = ["--training.engine_threads", str(threads)]
    if name == TREES:
        start = folder.with_name(folder.name.removesuffix(SUFFIXES[TREES])) / "warm-start"
        own += ["--training.warm_start", "0", "--training.init_from", str(start)]
        own += ["--env.tree_at", FORKS[env], *OF_TREES]
    with teacher(teacher_dir) if name == DISTILLED and teacher_dir else nullcontext(()) as of_teacher:
        subprocess.run([*command, *run_flags, *seed, *own, *flags, *of_teacher], check=True)
    answered = asyncio.run(evaluated(folder, settings, places, threads, first))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sampled = sampled_tokens(folder, [step["train/groups"] for step in metrics]) if env != BOTH else []
    seconds = sum(step["train/step_time"] for step in metrics)
    curves = []
    for each, place in places.items():
        of, shown = (f"train/{each}/", each) if env == BOTH else ("train/", name)
        rewards, lows, highs = (
            [step.get(f"{of}reward{end}", 0.0) for step in metrics] for end in ("", "_low", "_high")
        )
        tokens = [step.get(f"{of}tokens", 0) for step in metrics]
        before, warm, after = answered[each]
        of_run = {**settings, "env": each}
        curve = Curve(shown, of_run, rewards, lows, highs, before, after, seconds, warm, tokens, sampled)
        curves.append(curve.write(place))
    return curves


def sampled_tokens(folder: Path, groups: Sequence[int]) -> list[int]:
    """Sampled tokens of each step: of the groups in its batch, and of those with equal rewards that were played
    meanwhile.

    Args:
        groups: for each step the number of groups in its batch.
    """
    found, there, steps = [0], 0, list(groups)
    query = "SELECT tokens + undelivered, state FROM groups ORDER BY seq"
    with closing(sqlite3.connect(folder / "spool" / "outbox.db")) as outbox:
        for tokens, state in outbox.execute(query):
            if there == steps[len(found) - 1]:
                if len(found) == len(steps):
                    break  # what was sampled for a step that did not come
                found, there = [*found, 0], 0
            found[-1] += tokens
            there += state == DELIVERED
    return found


async def evaluated(
    folder: Path, settings: Mapping[str, Any], places: Mapping[str, Path], threads: int, first: Curve | None
) -> Mapping[str, Sequence[Sequence[Answer]]]:
    """The answers before a run, after its warm start if it has one, and after it, by environment. Those before are of
    the `first` run that began with the same weights."""
    found: dict[str, list[Sequence[Answer]]] = {env: [] for env in places}
    async with engine_of(folder, threads=threads) as service:
        for name, of in (("before", folder), ("warm", folder / "warm-start"), ("after", folder)):
            if first is not None and name != "after":
                for given in found.values():
                    given.append(first.before if name == "before" else first.warm)
                continue
            if not of.exists():
                for given in found.values():
                    given.append(())
                continue
            async with served(service, of, base=name == "before") as url:
                for env, place in places.items():
                    found[env].append(await answers(place / f"eval-{name}", url, env, settings))
    return found


async def answers(folder: Path, url: str, env: str, settings: Mapping[str, Any]) -> Sequence[Answer]:
    """The answers of the model at `url` to the held-out items."""
    shutil.rmtree(folder, ignore_errors=True)  # of a run that had fewer steps
    flags = {
        "openai.base_url": url,
        "env.tokenizer_name": str(model_folder("smollm2")),
        "env.data_dir_to_save_evals": str(folder),
        "env.dataset_seed": str(settings["seed"]),
        "env.eval_items": str(settings["items"]),
        "env.eval_temperature": "1.0",
        "env.max_eval_workers": "64",
    }
    arguments = [text for name, value in flags.items() for text in (f"--{name}", value)]
    env_cls = CLASSES[env]
    _, found = read_settings(env_cls, ["evaluate", "--config", str(_config(settings["env"])), *arguments])
    await env_cls(**found)._run_evaluate()
    given = list(_given(folder / "samples.jsonl"))
    if len(given) != settings["items"]:
        raise RuntimeError(f"{len(given)} of {settings['items']} held-out items were scored; see {folder}")
    return given


def _given(path: Path) -> Iterator[Answer]:
    """What was sampled, as text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder("smollm2"))
    for group in read_groups(path):
        texts = {
            sample["rollout_id"]: tokenizer.decode([token for token in sample["masks"] if token != MASKED])
            for sample in group["samples"]
        }
        for rollout in group["rollouts"]:
            item = group["item"]
            asked = json.dumps(item) if "rooms" in item else item["question"]
            read = rollout["metrics"].get("right_as_read", rollout["reward"]) == 1.0
            yield Answer(asked, texts[rollout["rollout_id"]], read)


def _config(env: str) -> Path:
    return CONFIGS / f"train_{'two_environments' if env == BOTH else env}.yaml"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--env", choices=[*CLASSES, BOTH], default="tool_call", help="(default: %(default)s)")
    add("--steps", type=int, default=18, help="(default: %(default)s)")
    add("--control-steps", type=int, default=18, help="of the control run; 0 leaves it out (default: %(default)s)")
    add("--trees", type=int, default=0, metavar="N", help="steps of a run whose rollouts branch (default: none)")
    add("--teacher", type=Path, metavar="DIR", help="folder of a run that has finished, such as DIR/seed-0")
    add("--distilled-steps", type=int, default=12, help="of the run with the teacher (default: %(default)s)")
    add("--items", type=int, default=64, help="held-out items (default: %(default)s)")
    add("--threads", type=int, default=2, help="of the engine (default: %(default)s)")
    add("--seed", type=int, nargs="+", default=[0], help="of the items and of the adapter; two runs each (default: 0)")
    add("--run-dir", type=Path, default=Path("data/train/demo"), help="a folder in it for each run (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
