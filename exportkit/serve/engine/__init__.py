"""Loads packages, batches what is asked of them, and runs it.

A request's way: `served_package` says which load and which method answers it, `checked_request` compares it with the
manifest, `dispatcher` lets it wait until a runner takes it with others, and `runners` run them on a `replica`. A step
of a sequence first waits for its turn in `served_sequences`, and `step_runner` runs it.

A package's way: `folder` finds it, `loading` loads it on every device and asks the C++ runtime whether its rows are
independent, `warm_up` shows that it answers, and `repository` exchanges it with what was served before.
"""
