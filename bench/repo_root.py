"""Put the repo's root on the path, so that `python bench/SCRIPT.py` finds the packages there."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
