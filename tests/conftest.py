"""What all tests share: the repo's root on the path, and one thread, so that sums have one order."""
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
torch.set_num_threads(1)
