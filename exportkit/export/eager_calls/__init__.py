"""Calls of the eager model: drawn, run and recorded, with what it should have answered."""
