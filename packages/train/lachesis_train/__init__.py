"""From finished rollouts to a trainer: the rollout API and its client, the policy server, the engine, TRL, and records.

A name is imported when it is first used, and torch with those that need it.
"""

from typing import TYPE_CHECKING

from backends.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis_train.api import ApiSettings, RolloutApiServer
    from lachesis_train.curves.estimators import token_estimates
    from lachesis_train.curves.recorder import TrainingRecorder
    from lachesis_train.curves.records import GroupRecord, SampleRecord, StepRecord
    from lachesis_train.engine import start_engine
    from lachesis_train.policy import CurrentPolicy, PolicyVersion, Sampled, Sampler
    from lachesis_train.policy_server import PolicyServer
    from lachesis_train.rollout_api import EnvDescription, RolloutApi
    from lachesis_train.trainers.agreement import SettingsDisagree
    from lachesis_train.trainers.items import write_items
    from lachesis_train.trainers.rows import BranchedRollout, RejectedRollout, UnscoredRollout
    from lachesis_train.trl.rollouts import LachesisRollouts
    from lachesis_train.trl.worker import LachesisRolloutWorker
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "lachesis_train.api": ["ApiSettings", "RolloutApiServer"],
            "lachesis_train.curves.estimators": ["token_estimates"],
            "lachesis_train.curves.recorder": ["TrainingRecorder"],
            "lachesis_train.curves.records": ["GroupRecord", "SampleRecord", "StepRecord"],
            "lachesis_train.engine": ["start_engine"],
            "lachesis_train.policy": ["CurrentPolicy", "PolicyVersion", "Sampled", "Sampler"],
            "lachesis_train.policy_server": ["PolicyServer"],
            "lachesis_train.rollout_api": ["EnvDescription", "RolloutApi"],
            "lachesis_train.trl.rollouts": ["LachesisRollouts"],
            "lachesis_train.trainers.items": ["write_items"],
            "lachesis_train.trainers.rows": ["BranchedRollout", "RejectedRollout", "UnscoredRollout"],
            "lachesis_train.trainers.agreement": ["SettingsDisagree"],
            "lachesis_train.trl.worker": ["LachesisRolloutWorker"],
        },
    )

__all__ = [
    "ApiSettings",
    "BranchedRollout",
    "CurrentPolicy",
    "EnvDescription",
    "GroupRecord",
    "LachesisRolloutWorker",
    "LachesisRollouts",
    "PolicyServer",
    "PolicyVersion",
    "RejectedRollout",
    "RolloutApi",
    "RolloutApiServer",
    "SampleRecord",
    "Sampled",
    "Sampler",
    "SettingsDisagree",
    "StepRecord",
    "TrainingRecorder",
    "UnscoredRollout",
    "start_engine",
    "token_estimates",
    "write_items",
]
