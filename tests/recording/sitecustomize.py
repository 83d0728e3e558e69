"""On the path of processes that tests start under ``--raise-sites``: they record, too."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import raise_sites

sys.path.pop()
if raise_sites.FOLDER in os.environ:
    sys.meta_path.insert(0, raise_sites.Awaited(Path(os.environ[raise_sites.FOLDER])))
