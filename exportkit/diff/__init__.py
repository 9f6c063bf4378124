"""Compares two artifacts. Executes and imports nothing of either, and does not import torch, unless both are to run."""
