"""Statistics of runs. `intervals` and `passes` have functions over `scores[i][j]`, sample j of item i."""
