"""Runs an artifact in a fresh process and compares its outputs with recorded ones and with the eager model's."""
