"""Lets the tests of this folder use the made-up runs of the integration tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "integration"))
