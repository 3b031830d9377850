"""Settings that TRL and an environment both have. One of them applies, or the training does not begin."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import get_annotations
from typing import Any

from backends.errors import LachesisError

INSTALL = 'pip install "lachesis-rl[trl]"'


class SettingsDisagree(LachesisError, ValueError):
    """A setting of TRL's and one of the environment's contradict each other, or one of TRL's would have no effect."""


def require_trl() -> None:
    """Raises LachesisError where a package is missing, with the command that installs it."""
    from importlib.util import find_spec

    if missing := [name for name in ("torch", "accelerate", "trl") if find_spec(name) is None]:
        raise LachesisError(f"training with TRL needs {' and '.join(missing)}, not installed here; {INSTALL}")


def is_chosen(config: Any, name: str) -> bool:
    """Whether somebody set this setting of an environment: in code, in a file, or as a class attribute."""
    redefined = sum(name in get_annotations(cls) for cls in type(config).__mro__) > 1
    return name in config.model_fields_set or redefined


def use_temperature(config: Any, temperature: float, *, where: str) -> None:
    """Have rollouts sampled at the trainer's temperature, by which it divides the logits.

    Raises:
        SettingsDisagree: the environment's settings name another one.
    """
    for name in ("agent_temperature", "eval_temperature"):
        own = getattr(config, name)
        if own != temperature and is_chosen(config, name):
            raise SettingsDisagree(
                f"env.{name} is {own:g} and {where}.temperature is {temperature:g}: the trainer divides all logits by "
                "its own, so the logprobs would be others than those sampled; set one of them to the other, or leave "
                f"env.{name} out"
            )
        setattr(config, name, temperature)
        config.model_fields_set.discard(name)  # nobody chose it: another trainer may have another one


def check_trainer(trainer: Any, env: Any, end_of_turn: tuple[int, ...], tokenizer: Any) -> None:
    """Raises `SettingsDisagree` with everything that does not fit together, a line each."""
    if problems := list(_problems(trainer, env, end_of_turn, tokenizer)):
        raise SettingsDisagree("\n".join(problems))


def _problems(trainer: Any, env: Any, end_of_turn: tuple[int, ...], tokenizer: Any) -> Iterator[str]:
    args, config = trainer.args, env.config
    if args.use_vllm:
        yield (
            "GRPOConfig.use_vllm is set, but LachesisRollouts samples from trainer.model; set it to False, or use "
            "AsyncGRPOTrainer with LachesisRolloutWorker, which samples from a vLLM server"
        )
    if trainer.is_fsdp_enabled:
        yield "FSDP shards trainer.model, from which LachesisRollouts samples; use DDP, DeepSpeed or one process"
    if trainer.tools:
        yield "GRPOTrainer has tools or an environment_factory; leave them out, for the environment has its own tools"
    for name, off in (("top_p", (1.0,)), ("top_k", (0, None)), ("min_p", (None, 0.0)), ("repetition_penalty", (1.0,))):
        if (value := getattr(args, name)) not in off:
            yield (
                f"GRPOConfig.{name} is {value}: it samples from another distribution than the one whose logprobs are "
                f"trained, which verify() of a sample rejects; set it to {off[0]}"
            )
    if args.generation_kwargs:
        yield "GRPOConfig.generation_kwargs has no effect on rollouts of an environment; leave it out"
    if args.chat_template_kwargs and args.chat_template_kwargs != config.chat_template_kwargs:
        yield (
            f"GRPOConfig.chat_template_kwargs is {args.chat_template_kwargs} and env.chat_template_kwargs is "
            f"{config.chat_template_kwargs}: prompts are made with the latter; set it, and leave TRL's out"
        )
    turns = args.max_tool_calling_iterations
    if turns is not None and turns + 1 != config.max_agent_turns:
        yield (
            f"GRPOConfig.max_tool_calling_iterations is {turns}, which allows {turns + 1} turns, and "
            f"env.max_agent_turns is {config.max_agent_turns}; set the latter, and leave TRL's out"
        )
    if trainer._tokenizer.get_vocab() != tokenizer.get_vocab():
        yield "GRPOTrainer.processing_class is another tokenizer than that of LachesisRollouts; pass the same to both"
    if missing := [token for token in end_of_turn if token not in trainer.eos_token_ids]:
        ends, known = (", ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (missing, trainer.eos_token_ids))
        yield (
            f"the chat template ends turns with {ends}, which is not among TRL's ends of sequences ({known}): it would "
            "take every completion for a truncated one; set tokenizer.eos_token or "
            "model.generation_config.eos_token_id"
        )
