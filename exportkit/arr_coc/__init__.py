"""ARR-COC: operators, the model that picks the patches of an image that matter for a query, its demo and its bench.

A guest: exportkit finds it through the entry points of its distribution, like anybody's operators and models.
"""
