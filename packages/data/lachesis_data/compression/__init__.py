"""Compression of finished trajectories to a budget of tokens."""
