"""The agent loop of verl: `AgentLoopBase.run` of verl 0.9 by an environment of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.errors import LachesisError
from lachesis_client.sampling import LogprobsKind
from lachesis_train.trainers.agreement import SettingsDisagree, use_temperature
from lachesis_train.trainers.called import CalledEnvironment, why
from lachesis_train.trainers.items import item_of
from lachesis_train.trainers.rows import Row, UnscoredRollout
from lachesis_train.trainers.sampler_engine import TokenRoom, TrainerCompletion, TrainerSamplerEngine


class LachesisLoop:
    """An agent loop for verl, which makes one for each rollout and calls `run`; see `agent_loop_config_path`.

    Args:
        env: the name of an environment, as `--env` takes it.
        settings: settings of the environment by name.
        on_branches: see `OnBranches`, for verl's trainers that take one row a rollout. Those of `verl.trainer.ppo.v1`
            take several.
        time_limit: seconds for a completion. An engine that cannot be placed would otherwise never answer.

    Raises:
        LachesisError: verl is not installed.
        SettingsDisagree: settings of verl's contradict those of the environment.
    """

    def __init__(
        self,
        *,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        env: str,
        settings: Mapping[str, Any] | None = None,
        on_branches: str = "error",
        time_limit: float = 600.0,
        **unused: Any,
    ) -> None:
        self.rollout = trainer_config.config.actor_rollout_ref.rollout
        # verl makes a loop for each rollout. What those of an entry of its file share is kept with the client of the
        # worker that makes them.
        given = dict(settings or {})
        if (kept := getattr(server_manager, "lachesis", None)) is None:
            kept = server_manager.lachesis = {}
        entry = repr((env, sorted(given.items()), on_branches, time_limit))
        if entry not in kept:
            kept[entry] = VerlEnvironment(env, self.rollout, server_manager, tokenizer, given, on_branches, time_limit)
        self.shared: VerlEnvironment = kept[entry]

    async def run(self, sampling_params: Mapping[str, Any], **row: Any) -> Any:
        """An `AgentLoopOutput`; of the trainers of `verl.trainer.ppo.v1` (they number the rollouts of a prompt with
        `session_id`) a list of them, which is empty for a rollout without a score.

        Raises:
            BranchedRollout, UnscoredRollout: the trainer takes exactly one row a rollout.
            RejectedRollout: a sample fails its verification.
        """
        several = "session_id" in row
        evaluation = float(sampling_params["temperature"]) != float(self.rollout.temperature)
        self.shared.use_sampling(sampling_params, evaluation=evaluation, where="actor_rollout_ref.rollout")
        first = int(row.get("session_id") or 0)
        (rollout,) = await self.shared.play(item_of(row), first=first, evaluation=evaluation)
        rows = await self.shared.rows(rollout, several=several, evaluation=evaluation)
        outputs = [self._output(each, rollout) for each in rows]
        if several:
            return outputs
        if not outputs:
            raise UnscoredRollout(
                f"rollout {rollout.rollout_id} of item {rollout.item_key} has no score ({why(rollout)}), and this "
                "trainer of verl takes a row of each rollout, which would count as 0; raise env.max_infra_retries, set "
                "env.score_of_timeout, or use a trainer of verl.trainer.ppo.v1, which leaves it out"
            )
        return outputs[0]

    def _output(self, row: Row, rollout: Any) -> Any:
        try:
            from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
        except ImportError as error:
            raise LachesisError(f'verl is not usable here ({error}); pip install "verl==0.9.1"') from error
        limits = {"prompt_length": len(row.prompt_ids), "response_length": len(row.completion_ids)}
        for name, length in limits.items():
            if length > (limit := getattr(self.rollout, name)):
                raise SettingsDisagree(
                    f"rollout {rollout.rollout_id} has a row with a {name} of {length}, and that of "
                    f"actor_rollout_ref.rollout is {limit}; raise it"
                )
        spans = row.sample.spans if row.sample is not None else ()
        steps = [int(name) for span in spans for name in (span.model_version or "").split("+") if name]
        return AgentLoopOutput(
            prompt_ids=list(row.prompt_ids),
            response_ids=list(row.completion_ids),
            response_mask=list(row.env_mask),
            response_logprobs=list(row.logprobs),
            reward_score=row.reward,
            num_turns=rollout.result.turns_used,
            metrics=AgentLoopMetrics(),
            extra_fields={
                "reward_extra_info": {},
                "min_global_steps": min(steps, default=None),
                "max_global_steps": max(steps, default=None),
                "lachesis_branches": row.branches,
                "lachesis_undelivered": row.undelivered,
            },
        )


class VerlEnvironment(CalledEnvironment):
    """What the loops of one worker of verl share."""

    taker = "this trainer of verl"

    def __init__(
        self,
        env: str,
        rollout: Any,
        manager: Any,
        tokenizer: Any,
        settings: Mapping[str, Any],
        on_branches: str,
        time_limit: float,
    ) -> None:
        room = TokenRoom("verl://server_manager", "rollout.response_length")
        room.after_first = rollout.response_length
        self.manager = manager
        kinds: dict[str, LogprobsKind] = {"processed_logprobs": "processed", "raw_logprobs": "raw"}
        kind = kinds.get(rollout.get("logprobs_mode") or "", "processed")
        engine = TrainerSamplerEngine(
            self._sample, tokenizer=tokenizer, url=room.url, logprobs=kind, room=room, time_limit=time_limit
        )
        super().__init__(env, engine, tokenizer=tokenizer, settings=settings, on_branches=on_branches, one_by_one=True)
        if not rollout.calculate_log_probs:
            raise SettingsDisagree("set actor_rollout_ref.rollout.calculate_log_probs: a certificate has the logprobs")
        use_temperature(self.env.config, float(rollout.temperature), where="actor_rollout_ref.rollout")

    async def _sample(self, prompt_ids: list[int], session: str, most: int, temperature: float) -> TrainerCompletion:
        parameters: dict[str, Any] = {"temperature": temperature, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}
        # The model's own settings may name another end, as those of base models do.
        parameters |= {"logprobs": True, "max_tokens": most, "stop_token_ids": sorted(self.server.prompts.end_of_turn)}
        given = await self.manager.generate(session, prompt_ids=prompt_ids, sampling_params=parameters)
        steps = [given.extra_fields.get(name) for name in ("min_global_steps", "max_global_steps")]
        return TrainerCompletion(given.token_ids, given.log_probs, given.stop_reason, steps)
