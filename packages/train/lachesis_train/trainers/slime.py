"""The rollout function of slime: `--custom-generate-function-path lachesis_train.trainers.slime.generate`.

Settings are attributes of slime's arguments, from its `--custom-config-path`: `lachesis_env`, and where they are needed
`lachesis_settings`, `lachesis_on_branches`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from backends.errors import LachesisError
from lachesis_client.client_settings import ServerSettings
from lachesis_tokens.engines import create_engine
from lachesis_train.trainers.agreement import SettingsDisagree
from lachesis_train.trainers.called import CalledEnvironment, why
from lachesis_train.trainers.items import item_of
from lachesis_train.trainers.rows import Row, UnscoredRollout

_REWARDS: Final = "lachesis_train.trainers.slime.rewards"
_DIVIDED: Final = ("grpo", "gspo", "cispo")
_WITH_BASELINES: Final = (*_DIVIDED, "reinforce_plus_plus_baseline")
"""The values of `--advantage-estimator` with which slime takes rewards relative to their groups."""


class SlimeEnvironment(CalledEnvironment):
    """What the rollouts of a process of slime share. Its SGLang router samples, and reports versions itself."""

    taker = "slime"

    def __init__(self, args: Any, tokenizer: Any) -> None:
        if not (env := getattr(args, "lachesis_env", None)):
            raise SettingsDisagree("lachesis_env is not set; name the environment in slime's --custom-config-path")
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        engine = create_engine("sglang", ServerSettings(base_url=url, model_name="policy", max_concurrency=1 << 20))
        on_branches = getattr(args, "lachesis_on_branches", None)
        settings = getattr(args, "lachesis_settings", None)
        super().__init__(env, engine, tokenizer=tokenizer, settings=settings, on_branches=on_branches, one_by_one=True)
        self.limit_tokens(args.rollout_max_response_len)


async def generate(args: Any, sample: Any, sampling_params: Mapping[str, Any], evaluation: bool = False) -> Any:
    """One rollout: slime's `Sample`, or a list of them, which have one `rollout_id`.

    A rollout without a score has one sample that is removed from the training (`remove_sample`), with the status
    ABORTED; `rewards` leaves it out of the baseline.

    Raises:
        UnscoredRollout: in an evaluation, which has no way to leave it out.
        SettingsDisagree: `rewards` is needed and not set, or sampling parameters contradict the environment.
        RejectedRollout: a sample fails its verification.
    """
    shared = _shared(args)
    shared.use_sampling(sampling_params, evaluation=evaluation, where="slime's rollout")
    (rollout,) = await shared.play(item_of(sample.metadata), first=sample.index or 0, evaluation=evaluation)
    rows = await shared.rows(rollout, evaluation=evaluation)
    if not rows and evaluation:
        raise UnscoredRollout(
            f"rollout {rollout.rollout_id} of item {rollout.item_key} has no score ({why(rollout)}), and an evaluation "
            "of slime would count it as 0; raise env.max_infra_retries"
        )
    if len(rows) != 1 and getattr(args, "custom_reward_post_process_path", None) != _REWARDS:
        what = f"{len(rows)} samples" if rows else f"no score ({why(rollout)})"
        raise SettingsDisagree(
            f"rollout {rollout.rollout_id} of item {rollout.item_key} has {what}, and slime's own baselines count "
            f"samples; set --custom-reward-post-process-path {_REWARDS}"
        )
    made = [_filled(sample, row, shared) for row in rows] or [_removed(sample, why(rollout))]
    return made if len(made) > 1 else made[0]


def rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """For `--custom-reward-post-process-path`: the rewards, and the advantages of their rollouts.

    Each rollout counts once in the baseline of its group, however many samples it has, and not at all without a score.
    Where slime's settings use no baselines, the second ones are the rewards too.
    """
    if args.advantage_estimator not in _WITH_BASELINES or not args.rewards_normalization:
        plain = [float(sample.reward) for sample in samples]
        return plain, plain
    divides = args.grpo_std_normalization and args.advantage_estimator in _DIVIDED
    groups: dict[Any, dict[Any, float]] = defaultdict(dict)
    for sample in samples:
        if not sample.remove_sample:
            groups[sample.group_index][_rollout(sample)] = float(sample.reward)
    raw = [float(sample.reward) for sample in samples]
    advantages = []
    for sample in samples:
        known = list(groups[sample.group_index].values())
        value = 0.0 if sample.remove_sample else float(sample.reward) - float(np.mean(known))
        if divides and len(known) > 1:
            value /= float(np.std(known, ddof=1)) + 1e-6
        advantages.append(value)
    return raw, advantages


def _shared(args: Any) -> SlimeEnvironment:
    """The environment of this process, kept with slime's own state of it."""
    try:
        from slime.rollout.sglang_rollout import GenerateState
    except ImportError as error:
        raise LachesisError(
            f"slime is not usable here ({error}); install it as its repository THUDM/slime says"
        ) from error
    state = GenerateState(args)
    if (shared := getattr(state, "lachesis", None)) is None:
        shared = state.lachesis = SlimeEnvironment(args, state.tokenizer)
    return shared


def _rollout(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def _filled(sample: Any, row: Row, shared: SlimeEnvironment) -> Any:
    """A copy of slime's sample with a row."""
    spans = row.sample.spans if row.sample is not None else ()
    filled = copy.copy(sample)
    filled.rollout_id = _rollout(sample)
    filled.tokens = [*row.prompt_ids, *row.completion_ids]
    filled.response = shared.tokenizer.decode(row.completion_ids)
    filled.response_length = len(row.completion_ids)
    filled.loss_mask = list(row.env_mask)
    filled.rollout_log_probs = list(row.logprobs)
    filled.reward = row.reward
    filled.weight_versions = [name for span in spans for name in (span.model_version or "").split("+") if name]
    truncated = bool(spans) and spans[-1].finish_reason == "length"
    filled.status = type(sample).Status.TRUNCATED if truncated else type(sample).Status.COMPLETED
    filled.metadata = {
        **(sample.metadata or {}),
        "lachesis_branches": row.branches,
        "lachesis_undelivered": row.undelivered,
    }
    return filled


def _removed(sample: Any, reason: str) -> Any:
    removed = copy.copy(sample)
    removed.rollout_id = _rollout(sample)
    removed.tokens, removed.response, removed.response_length = [0, 0], "", 1
    removed.loss_mask, removed.rollout_log_probs = [0], [0.0]
    removed.reward, removed.remove_sample, removed.weight_versions = 0.0, True, []
    removed.status = type(sample).Status.ABORTED
    removed.metadata = {**(sample.metadata or {}), "lachesis_unscored": reason}
    return removed
