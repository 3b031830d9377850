"""Groups that an environment collects itself: what was sampled meanwhile is recorded, and the groups are made of it."""
