"""Helpers of these tests lie in this folder, the small Hub beside the tests of the Hub."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "checkpoint")]
