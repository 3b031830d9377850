"""Attacks on sandboxes, as tests of every backend and for `lachesis sandboxes attack`.

An attack gets a backend and returns its result: the protection held, it fell, or there is nothing to attack. Attacks
change nothing outside their sandboxes, even without isolation.
"""

from .attack import Attack, AttackTarget, Fell, Held, NotApplicable, Verdict, attacked
from .control_channel import control_channel
from .kernel_surface import kernel_surface
from .leftovers import leftovers
from .neighbour_signals import neighbour_signals
from .network_off import network_off
from .resources import resources
from .secrets_outside import secrets_outside
from .time_limits import time_limits

FAMILIES = (
    time_limits,
    control_channel,
    secrets_outside,
    network_off,
    kernel_surface,
    resources,
    neighbour_signals,
    leftovers,
)
ATTACKS: tuple[Attack, ...] = tuple(attack for family in FAMILIES for attack in family.attacks)

__all__ = ["ATTACKS", "Attack", "AttackTarget", "Fell", "Held", "NotApplicable", "Verdict", "attacked"]
