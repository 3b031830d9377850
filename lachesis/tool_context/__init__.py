"""What rewards do in the sandbox of a rollout."""
