"""Traces a model to programs, and checks that they say what the model does."""
