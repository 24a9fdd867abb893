"""Property tests run as those of the core do."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("shared")
