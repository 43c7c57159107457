"""Machines for tests of the core: plain numbers for time, no driver."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `wired`, shared by the tests of this folder
