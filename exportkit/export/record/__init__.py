"""Draws, runs and records calls of the eager model, and computes what it should have answered."""
