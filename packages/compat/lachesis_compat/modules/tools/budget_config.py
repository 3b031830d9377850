"""The budget of tool results."""

from lachesis_tools.budget import (
    DEFAULT_PREVIEW_SIZE_CHARS,
    DEFAULT_RESULT_SIZE_CHARS,
    DEFAULT_TURN_BUDGET_CHARS,
)
from lachesis_tools.budget import ResultBudget as BudgetConfig

DEFAULT_BUDGET = BudgetConfig()

__all__ = [
    "DEFAULT_BUDGET",
    "DEFAULT_PREVIEW_SIZE_CHARS",
    "DEFAULT_RESULT_SIZE_CHARS",
    "DEFAULT_TURN_BUDGET_CHARS",
    "BudgetConfig",
]
