"""Environments under TRL's trainers: `rollout_func` of `GRPOTrainer`, and the rollout worker of `AsyncGRPOTrainer`."""

from typing import TYPE_CHECKING

from lachesis.lazy import lazy_names

if TYPE_CHECKING:
    from lachesis_train.trl.rollouts import LachesisRollouts
    from lachesis_train.trl.rows import BranchedRollout, RejectedRollout
    from lachesis_train.trl.trainer_settings import SettingsDisagree
    from lachesis_train.trl.worker import LachesisRolloutWorker
else:
    __getattr__ = lazy_names(
        __name__,
        {
            f"{__name__}.rollouts": ["LachesisRollouts"],
            f"{__name__}.rows": ["BranchedRollout", "RejectedRollout"],
            f"{__name__}.trainer_settings": ["SettingsDisagree"],
            f"{__name__}.worker": ["LachesisRolloutWorker"],
        },
    )

__all__ = ["BranchedRollout", "LachesisRolloutWorker", "LachesisRollouts", "RejectedRollout", "SettingsDisagree"]
