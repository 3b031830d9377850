"""A rollout API on the wire of Atropos' `run-api` that loses no group and doubles none: see docs/rollout-api.md."""

from lachesis_train.api.server import RolloutApiServer
from lachesis_train.api.settings import ApiSettings

__all__ = ["ApiSettings", "RolloutApiServer"]
