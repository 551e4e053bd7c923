"""Lets the tests of this folder use the stand-in models of the unit tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "unit"))
