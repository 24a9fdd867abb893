"""Property tests have no deadline: machines are shared."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
