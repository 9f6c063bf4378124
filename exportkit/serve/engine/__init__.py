"""Loads packages, batches what is asked of them, and runs it.

A request's way: `served` accepts it, `checked_request` compares it with the manifest, `dispatcher` lets it wait until a
runner takes it with others, and `execution` runs them on a `model_copy`.

A package's way: `folder` finds it, `loading` loads it on every device, `warm_up` shows that it answers and that its
rows are independent (`batchable`), and `repository` exchanges it with what was served before.
"""
