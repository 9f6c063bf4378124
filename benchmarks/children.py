"""What the processes that benchmarks start need."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]
# For PYTHONPATH: this source tree, then where the caller finds packages.
SEARCH_PATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
