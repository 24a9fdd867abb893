"""The whole store under everything at once, with kills: `mixed_stress`. tox runs it for a minute."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("mixed_stress.py")
SECONDS = os.environ.get("UCM_STRESS_SECONDS", "10")


def test_killed_processes_serve_no_wrong_byte_and_leave_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), SECONDS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=float(SECONDS) + 300)
    assert done.returncode == 0, done.stdout + done.stderr
    report = re.search(r"(\d+) kills, (\d+) calls", done.stdout)
    assert report is not None
    assert int(report[1]) > 0 < int(report[2])
