"""Files of what was played: groups, ShareGPT, JSON Lines, and their digests."""
