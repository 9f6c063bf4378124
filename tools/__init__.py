"""Writes the generated parts of the documents. `make docs` runs every module here; tests fail when a document is stale.

These modules work on a checkout of the repository and are not part of the installed package.
"""
