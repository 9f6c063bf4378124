"""Finds, reads and rebuilds the model that MODEL names: its methods and arguments, its device, its lines."""
