"""The trainer: batches of the rollout API, each sample verified, one step of the engine for each batch."""
