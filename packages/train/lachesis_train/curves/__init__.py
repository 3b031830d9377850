"""What a training run shows of itself: metrics, progress, the rollouts of each step, and a report."""
