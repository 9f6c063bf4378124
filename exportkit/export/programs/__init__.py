"""Saved programs: read, prepared like a newly traced one, made a module, or cut."""
