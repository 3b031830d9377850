"""Compression of long conversations: the middle turns become one summary, in files and while a rollout is played."""
