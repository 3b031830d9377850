"""The output of a training run: metrics, progress, the rollouts of each step, and a report."""
