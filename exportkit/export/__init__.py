"""Exports a model to an artifact: finds it, checks it, traces it, compiles it and records what it answers."""
