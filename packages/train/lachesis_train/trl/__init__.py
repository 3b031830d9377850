"""Environments under TRL's trainers: `rollout_func` of `GRPOTrainer`, and the rollout worker of `AsyncGRPOTrainer`."""
