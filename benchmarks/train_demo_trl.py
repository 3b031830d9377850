"""`make train-demo-trl`: SmolLM2-135M learns to call tools under TRL's GRPOTrainer; with shuffled rewards it does not.

    python -m benchmarks.train_demo_trl [--steps N] [--control-steps N] [--seed N ...] [--folder DIR]

Task and settings are those of `lachesis train` (configs/train_tool_call.yaml). In the control run the rewards of a
batch are permuted among its rollouts, and all else is the same. Prints both rates of right calls, of those that are
whole and of those that the parser reads, and writes curve.svg. A run that has finished in its folder with the same
arguments is not repeated.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learning_curves import CONTROL, TRAINED, Answer, Curve, conclude, kept
from lachesis.figures.intervals import mean_over_items

CONFIG = Path("configs/train_tool_call.yaml")
LAYERS = 30
MICRO = 4
"""Rollouts of a backward pass: their logits, of 49152 tokens each, stay small enough for the processor's cache."""


def main() -> int:
    """Run all; 1 if a model has not learned or a control has."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=18, help="(default: %(default)s)")
    add("--control-steps", type=int, default=18, help="of the control run; 0 leaves it out (default: %(default)s)")
    add("--items", type=int, default=64, help="held-out items (default: %(default)s)")
    add("--seed", type=int, nargs="+", default=[0], help="of the items and of the trainer; two runs each (default: 0)")
    add("--folder", type=Path, default=Path("data/train/tool-call-trl"), help="a folder in it for each run")
    add("--threads", type=int, default=1)
    given = parser.parse_args()
    curves = []
    for seed in given.seed:
        for name, steps in ((TRAINED, given.steps), (CONTROL, given.control_steps)):
            folder = given.folder / f"seed-{seed}{'-control' if name == CONTROL else ''}"
            settings = {"seed": seed, "steps": steps, "items": given.items}
            if steps:
                curves.append(kept(folder, settings) or train(name, folder, settings, given.threads))
    return conclude(curves, given.folder / "curve.svg")


class Observed:
    """The `rollout_func` and the reward function of `LachesisRollouts`, with what they return written down."""

    def __init__(self, rollouts: Any, tokenizer: Any, group_size: int, shuffled: random.Random | None) -> None:
        self.rollouts = rollouts
        self.tokenizer = tokenizer
        self.group_size = group_size
        self.shuffled = shuffled
        """Permutes the rewards of a training batch; None leaves them."""
        self.steps: list[list[list[float]]] = []
        """The rewards of each group of each training batch."""
        self.answers: list[Answer] = []
        """To held-out items, in order."""
        self._trains = False

    def play(self, prompts: Sequence[Any], trainer: Any) -> dict[str, list[Any]]:
        rows: dict[str, list[Any]] = self.rollouts(prompts, trainer)
        self._trains = trainer.model.training
        if not self._trains:
            columns = ("completion_ids", "env_mask", "lachesis_figures")
            for prompt, ids, mask, figures in zip(prompts, *(rows[name] for name in columns), strict=True):
                text = self.tokenizer.decode([token for token, sampled in zip(ids, mask, strict=True) if sampled])
                self.answers.append(Answer(prompt[-1]["content"], text, figures["right_as_read"] == 1.0))
        return rows

    def lachesis_reward(self, **given: Any) -> list[float | None]:
        rewards: list[float | None] = self.rollouts.lachesis_reward(**given)
        if self._trains:
            size = self.group_size
            scored = [
                [reward for reward in rewards[at : at + size] if reward is not None]
                for at in range(0, len(rewards), size)
            ]
            self.steps.append(scored)
            if self.shuffled is not None:
                self.shuffled.shuffle(rewards)
        return rewards


def train(name: str, folder: Path, settings: Mapping[str, Any], threads: int) -> Curve:
    """Evaluate, train, evaluate again."""
    import torch
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from lachesis_envs.tool_call import ToolCallEnv
    from lachesis_tokens.prompts.model_folders import model_folder
    from lachesis_train import LachesisRollouts

    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    env, training = {**config["env"], "eval_items": settings["items"]}, config["training"]
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(threads)
    base = model_folder(training["base_model"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    # The adapter stays float32. The frozen weights in bfloat16 halve the time of a forward pass on a CPU.
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    steps, batch, group = settings["steps"], env["batch_size"], env["group_size"]
    args = GRPOConfig(
        output_dir=str(folder),
        max_steps=steps,
        seed=settings["seed"],
        per_device_train_batch_size=MICRO,
        gradient_accumulation_steps=batch // MICRO,
        num_generations=group,
        num_generations_eval=1,
        max_completion_length=env["max_token_length"],
        learning_rate=training["learning_rate"],
        adam_beta2=0.95,
        lr_scheduler_type="constant",
        loss_type="dapo",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        gradient_checkpointing=False,
    )
    lora = LoraConfig(
        r=training["lora_rank"],
        lora_alpha=2 * training["lora_rank"],
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        layers_to_transform=list(range(LAYERS - training["engine_lora_layers"], LAYERS)),
    )
    began = time.monotonic()
    seed = settings["seed"]
    with LachesisRollouts(ToolCallEnv, tokenizer=tokenizer, settings={**env, "dataset_seed": seed}) as rollouts:
        observed = Observed(rollouts, tokenizer, group, random.Random(seed) if name == CONTROL else None)
        held_out = list(rollouts.eval_dataset()["prompt"])
        trainer = GRPOTrainer(
            model,
            [observed.lachesis_reward],
            args,
            train_dataset=rollouts.dataset(steps * batch // group),
            processing_class=tokenizer,
            rollout_func=observed.play,
            peft_config=lora,
        )
        # trainer.evaluate() would compute a loss too, which takes longer than the answers.
        trainer.model.eval()
        observed.play(held_out, trainer)
        trainer.train()
        trainer.model.eval()
        observed.play(held_out, trainer)
    before, after = observed.answers[: settings["items"]], observed.answers[settings["items"] :]
    if len(after) != settings["items"]:
        raise RuntimeError(f"{len(observed.answers)} answers to twice {settings['items']} held-out items")
    means = [mean_over_items(groups) for groups in observed.steps]
    rewards, lows, highs = ([getattr(mean, field) for mean in means] for field in ("mean", "low", "high"))
    seconds = time.monotonic() - began
    return Curve(name, settings, rewards, lows, highs, before, after, seconds).write(folder)


if __name__ == "__main__":
    raise SystemExit(main())
