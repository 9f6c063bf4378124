"""Loads packages, batches what is asked of them, and runs it."""
