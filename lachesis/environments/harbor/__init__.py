"""Task folders in Harbor's format: played and graded."""

from lachesis.environments.harbor.causes import CAUSES, Cause, Invalid
from lachesis.environments.harbor.environment import HarborEnv, HarborEnvConfig
from lachesis.environments.harbor.grading import Grading, grade, grade_again
from lachesis.environments.harbor.verdicts import Verdict

__all__ = ["CAUSES", "Cause", "Grading", "HarborEnv", "HarborEnvConfig", "Invalid", "Verdict", "grade", "grade_again"]
