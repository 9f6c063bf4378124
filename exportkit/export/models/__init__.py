"""Finds and reads the model that MODEL names: its import, its methods and arguments, its device, its lines."""
