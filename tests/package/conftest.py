"""The C++ reader is asked wherever the Python reader is."""

from tests.both_readers import both_readers

__all__ = ["both_readers"]
