"""Lets these tests use the stand-ins of the unit tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
