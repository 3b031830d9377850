"""Task folders in Harbor's format: run and graded."""

from lachesis_envs.harbor.causes import CAUSES, Cause, Invalid
from lachesis_envs.harbor.environment import HarborEnv, HarborEnvConfig
from lachesis_envs.harbor.grading import Grading, grade, grade_again
from lachesis_envs.harbor.verdicts import Verdict

__all__ = ["CAUSES", "Cause", "Grading", "HarborEnv", "HarborEnvConfig", "Invalid", "Verdict", "grade", "grade_again"]
