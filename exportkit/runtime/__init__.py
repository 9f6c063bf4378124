"""Loads a package and runs it, without the exporter and without any model's or operator's source."""
