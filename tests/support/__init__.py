"""Real servers and helpers that several tests share."""
