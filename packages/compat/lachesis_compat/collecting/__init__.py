"""Groups that an environment collects itself: everything sampled in the meantime is recorded, and the groups are built
from it.
"""
