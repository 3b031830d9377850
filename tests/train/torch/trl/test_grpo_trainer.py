"""`LachesisRollouts` in TRL's own GRPOTrainer, with a real model: what is trained is what was sampled."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl.trainer.grpo_trainer", reason="trl or torch is not installed; `make test-train` has them")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOTrainer

from backends.errors import LachesisError
from lachesis_messages.tokens import MASKED, digest_of
from lachesis_tokens.samples.verification import verify
from lachesis_train import LachesisRollouts, SettingsDisagree
from lachesis_train.trainers.items import environment_of
from lachesis_train.trainers.rows import BranchedRollout
from tests.train.torch.trl.envs import AsksAgain, LeavesOut, Raises, SayAscii, WritesFile, arguments, conversation

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


class Exact:
    """A reward function that scores nothing: it compares what TRL got with the certificates, and with the policy."""

    def __init__(self, model: Any) -> None:
        self.model, self.rows, self.gap, self.spans = model, 0, 0.0, 0

    def __call__(self, completion_ids: list[list[int]], lachesis_sample: list[Any], **_: Any) -> list[None]:
        for ids, sample in zip(completion_ids, lachesis_sample, strict=True):
            assert verify(sample) == []
            start = sample.spans[0].start
            for span in sample.spans:
                sampled = [*sample.tokens[:start], *ids][: span.end]
                assert digest_of(sampled) == span.digest
            assert len(ids) == len(sample.tokens) - start
            self.rows += 1
            self.spans += len(sample.spans)
            self.gap = max(self.gap, *self.gaps(sample))
        return [None] * len(completion_ids)

    def gaps(self, sample: Any) -> list[float]:
        """|sampled - computed| logprobs, by one forward pass of the trainer's model as it is now."""
        training = self.model.training
        self.model.eval()
        with torch.no_grad():
            logits = self.model(torch.tensor([sample.tokens])).logits[0, :-1].double()
        self.model.train(training)
        computed = [0.0, *logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[1:])[:, None])[:, 0].tolist()]
        rows = zip(sample.masks, sample.logprobs, computed, strict=True)
        return [abs(reported - own) for mask, reported, own in rows if mask != MASKED]


def trainer_of(rollouts: LachesisRollouts, model: Any, args: Any, *rewards: Any, **more: Any) -> GRPOTrainer:
    return GRPOTrainer(
        model,
        [*rollouts.reward_funcs, *rewards],
        args,
        train_dataset=rollouts.dataset(args.max_steps * 8),
        processing_class=rollouts.tokenizer,
        rollout_func=rollouts,
        **more,
    )


def recording(trainer: GRPOTrainer, rollouts: LachesisRollouts) -> list[dict[str, Any]]:
    """What the rollout function returns from now on."""
    returned = []

    def record(prompts: list[Any], given: GRPOTrainer) -> dict[str, Any]:
        returned.append(rollouts(prompts, given))
        return returned[-1]

    trainer.rollout_func = record
    return returned


def logged(trainer: GRPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_the_reward_rises_and_the_trainer_gets_exactly_the_sampled_tokens(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    exact = Exact(model)
    with LachesisRollouts(SayAscii, tokenizer=tokenizer) as rollouts:
        args = arguments(tmp_path, per_device_train_batch_size=32, num_generations=8, max_steps=15)
        trainer = trainer_of(rollouts, model, args, exact)
        trainer.train()
    rewards = logged(trainer, "reward")
    assert sum(rewards[:2]) / 2 < 0.7 < 0.9 < sum(rewards[-2:]) / 2
    assert exact.rows == rollouts.totals["rollouts"] == 15 * 32
    assert exact.gap < 1e-5, "left padding, the cache and the batch change nothing"
    assert rollouts.totals["unscored"] == 0
    assert rollouts.totals["trained"] == round(sum(logged(trainer, "completions/mean_length")) * 32)


@pytest.fixture(scope="module")
def solves(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that solves `WritesFile`: the tiny one, trained on one conversation until it repeats it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    explains = ("# Tools", "You are provided", "For each function", "within <tool_call>", '{"name": <function-name>')
    lines = tokenizer.chat_template.splitlines()  # a prompt of two thousand bytes takes a minute to learn
    shorter = "\n".join(line for line in lines if not any(text in line for text in explains))
    tokenizer.chat_template = shorter.replace("tool | tojson", "tool.function.name")
    env = environment_of(WritesFile, None)
    text = tokenizer.apply_chat_template(conversation(env), tools=env.tool_definitions(), tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(300):
        loss = model(input_ids=ids, labels=ids).loss
        if loss.item() < 0.01:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    place = tmp_path_factory.mktemp("solves")
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def test_tool_results_are_in_the_context_and_are_not_trained(tmp_path: Path, solves: Path) -> None:
    """The whole path: the model calls a tool, the sandbox runs it, the reward reads the sandbox, TRL trains the row."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(solves), AutoTokenizer.from_pretrained(solves)
    exact = Exact(model)
    with LachesisRollouts(WritesFile, tokenizer=tokenizer) as rollouts:
        args = arguments(tmp_path, max_completion_length=600, learning_rate=1e-6)
        trainer = trainer_of(rollouts, model, args, exact)
        returned = recording(trainer, rollouts)
        trainer.train()
    assert exact.gap < 1e-4
    assert exact.spans > exact.rows, "rollouts of several turns"
    assert logged(trainer, "lachesis/turns")[0] > 1
    assert logged(trainer, "reward")[0] > 0.5
    for ids, mask, logprobs, sample in zip(
        *(returned[0][name] for name in ("completion_ids", "env_mask", "logprobs", "lachesis_sample")), strict=True
    ):
        assert len(ids) == len(mask) == len(logprobs)
        assert sum(mask) == sample.trained
        start = sample.spans[0].start
        for span in sample.spans:
            assert all(mask[span.start - start : span.end - start])
        between = [ids[a.end - start : b.start - start] for a, b in itertools.pairwise(sample.spans)]
        assert all("<tool_response>" in tokenizer.decode(part) for part in between)
        assert all(value == 0.0 for value, trained in zip(logprobs, mask, strict=True) if not trained)


def test_a_rollout_ends_within_max_completion_length(tmp_path: Path, solves: Path) -> None:
    """The limit is that of all turns together: here it falls into the result of the tool, or the answer to it."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(solves), AutoTokenizer.from_pretrained(solves)
    with LachesisRollouts(WritesFile, tokenizer=tokenizer) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path, max_completion_length=100))
        returned = recording(trainer, rollouts)
        trainer.train()
    assert max(map(len, returned[0]["completion_ids"])) <= 100
    assert logged(trainer, "reward")[0] > 0.5, "the command ran, and the reward saw what it left"
    assert rollouts.totals["unscored"] == 0


def test_a_rollout_without_a_score_is_in_no_baseline_and_trains_nothing(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with LachesisRollouts(LeavesOut, tokenizer=tokenizer, settings={"max_infra_retries": 0}) as rollouts:
        args = arguments(tmp_path, beta=0.0)
        trainer = trainer_of(rollouts, model, args)
        returned = recording(trainer, rollouts)
        trainer.train()
    assert returned[0]["lachesis_reward"] == [1.0, 1.0, None, None] * 2
    assert [sum(mask) > 0 for mask in returned[0]["env_mask"]] == [True, True, False, False] * 2
    assert logged(trainer, "reward") == [1.0]
    assert logged(trainer, "lachesis/unscored") == [0.5]
    assert all(torch.equal(before[name], weight) for name, weight in model.named_parameters()), "all advantages are 0"


def test_an_environment_that_scores_nothing_stops_the_training(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    with LachesisRollouts(Raises, tokenizer=tokenizer, settings={"max_infra_retries": 0}) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path, max_steps=4))
        with pytest.raises(LachesisError, match=r"(?s)last 3 groups.*max_failed_groups.*no judge here"):
            trainer.train()


@pytest.mark.parametrize(
    ("settings", "args", "names"),
    [
        ({"agent_temperature": 0.7}, {}, ("env.agent_temperature", "GRPOConfig.temperature")),
        ({}, {"top_p": 0.9}, ("GRPOConfig.top_p", "verify")),
        ({}, {"generation_kwargs": {"num_beams": 2}}, ("GRPOConfig.generation_kwargs",)),
        ({}, {"max_tool_calling_iterations": 7}, ("max_tool_calling_iterations", "env.max_agent_turns")),
        ({}, {"chat_template_kwargs": {"a": 1}}, ("GRPOConfig.chat_template_kwargs", "env.chat_template_kwargs")),
    ],
)
def test_settings_that_contradict_each_other_are_named(
    tmp_path: Path, model: Any, tokenizer: Any, settings: dict[str, Any], args: dict[str, Any], names: tuple[str, ...]
) -> None:
    with LachesisRollouts(SayAscii, tokenizer=tokenizer, settings=settings) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path, **args))
        with pytest.raises(SettingsDisagree) as caught:
            trainer.train()
    assert all(name in str(caught.value) for name in names)


def test_another_end_of_turn_than_that_of_trl_is_an_error(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    tokenizer.eos_token = "<|endoftext|>"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    with LachesisRollouts(SayAscii, tokenizer=tokenizer) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path))
        with pytest.raises(SettingsDisagree, match=r"<\|im_end\|>.*generation_config"):
            trainer.train()


def test_evaluation_plays_num_generations_eval_rollouts_of_its_own_items(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    with LachesisRollouts(SayAscii, tokenizer=tokenizer) as rollouts:
        held_out = rollouts.eval_dataset()
        args = arguments(tmp_path, num_generations_eval=2, temperature=0.8)
        trainer = trainer_of(rollouts, model, args, eval_dataset=held_out)
        returned = recording(trainer, rollouts)
        metrics = trainer.evaluate()
        trainer.train()
    assert [row["prompt"][-1]["content"] for row in held_out] == ["say 0", "say 1"]
    assert trainer.train_dataset[0]["prompt"][-1]["content"] == "say 2"
    assert 0 < metrics["eval_reward"] <= 1
    assert [len(rows["prompt_ids"]) for rows in returned] == [2 * 2, 2 * 4]
    temperatures = {
        span.sampling["temperature"] for rows in returned for row in rows["lachesis_sample"] for span in row.spans
    }
    assert temperatures == {0.8}, "that of the trainer, also in evaluation"
    of_training = sum(map(sum, returned[1]["env_mask"]))
    assert rollouts.totals["trained"] == of_training > 0, "nothing is trained in an evaluation"
    assert all(module.training for module in model.modules()), "the trainer's mode is restored"


def test_an_adapter_is_sampled_and_trained(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    from peft import LoraConfig

    config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    exact = Exact(model)
    with LachesisRollouts(SayAscii, tokenizer=tokenizer) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path), exact, peft_config=config)
        exact.model = trainer.model
        trainer.train()
    assert exact.rows == 8
    assert exact.gap < 1e-5, "with the adapter, without its dropout"


@pytest.mark.parametrize("on_branches", ["last", "longest"])
def test_one_sample_of_a_branched_rollout_is_trained_and_the_rest_is_counted(
    tmp_path: Path, model: Any, tokenizer: Any, on_branches: Any
) -> None:
    exact = Exact(model)
    with LachesisRollouts(AsksAgain, tokenizer=tokenizer, on_branches=on_branches) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path), exact)
        returned = recording(trainer, rollouts)
        trainer.train()
    assert (exact.rows, exact.spans) == (8, 8)
    assert exact.gap < 1e-5
    assert rollouts.totals["branched"] == rollouts.totals["rollouts"] == 8
    assert rollouts.totals["undelivered"] > 0
    asked_again = ["again" in tokenizer.decode(ids) for ids in returned[0]["prompt_ids"]]
    sampled = [sum(mask) for mask in returned[0]["env_mask"]]
    if on_branches == "last":
        assert all(asked_again)
        assert max(sampled) <= 4
    else:
        assert not any(again and count < 4 for again, count in zip(asked_again, sampled, strict=True))
        assert max(sampled) > 4
    assert sum(sampled) == rollouts.totals["trained"]


def test_a_branched_rollout_stops_the_training_unless_a_setting_chooses(
    tmp_path: Path, model: Any, tokenizer: Any
) -> None:
    with LachesisRollouts(AsksAgain, tokenizer=tokenizer) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path))
        with pytest.raises(BranchedRollout, match=r"rollout .* of item \S+ has 2 samples.*set on_branches='last'"):
            trainer.train()


def test_prompts_of_another_dataset_are_refused(tmp_path: Path, model: Any, tokenizer: Any) -> None:
    with LachesisRollouts(SayAscii, tokenizer=tokenizer) as rollouts:
        trainer = trainer_of(rollouts, model, arguments(tmp_path))
        with pytest.raises(LachesisError, match="names no item"):
            rollouts([[{"role": "user", "content": "hello"}]], trainer)
