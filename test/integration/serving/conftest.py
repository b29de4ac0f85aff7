"""Puts the rig of these tests on the module path."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
