"""Makes the helpers of this folder importable; property tests have no deadline: machines are shared."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")
