"""What holds for every test: how long an example takes says more about the machine than about the code."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(  # over the one that hypothesis has chosen, which is another on CI
    "untimed", parent=settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")
