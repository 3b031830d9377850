"""Statistics of evaluations: pure functions over `scores[i][j]`, sample j of item i; None is an invalid sample."""

from lachesis.figures.intervals import Mean, Scores, mean_over_items
from lachesis.figures.pairs import Difference, paired
from lachesis.figures.passes import Bounds, bounds, ks, pass_at_k, pass_hat_k, samples_needed

__all__ = [
    "Bounds",
    "Difference",
    "Mean",
    "Scores",
    "bounds",
    "ks",
    "mean_over_items",
    "paired",
    "pass_at_k",
    "pass_hat_k",
    "samples_needed",
]
