"""Writes new operators from templates, and builds operator libraries while somebody works on them."""
