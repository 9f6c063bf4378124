"""`python -m exportkit`."""

import sys

from exportkit.cli import main

sys.exit(main())
