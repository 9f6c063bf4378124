"""The C++ runtime is asked wherever Python's is."""

from tests.both_readers import both_readers
from tests.both_trust import both_trust

__all__ = ["both_readers", "both_trust"]
