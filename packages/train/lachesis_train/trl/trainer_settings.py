"""Settings that TRL and an environment both have. One of them applies, or the training does not begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from backends.errors import LachesisError
from lachesis_train.trainers.agreement import SettingsDisagree

INSTALL = 'pip install "lachesis-rl[trl]"'


def require_trl() -> None:
    """Raises LachesisError where a package is missing, with the command that installs it."""
    from importlib.util import find_spec

    if missing := [name for name in ("torch", "accelerate", "trl") if find_spec(name) is None]:
        raise LachesisError(f"training with TRL needs {' and '.join(missing)}, not installed here; {INSTALL}")


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
