"""The C++ reader is asked wherever the Python reader is."""

from tests.both_readers import both_readers
from tests.both_trust import both_trust

__all__ = ["both_readers", "both_trust"]
