"""Makes the helpers of this folder importable; property tests run as those of the core do."""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("shared")
