"""Operators and packages beside what a user would pick instead, on the same inputs in one run.

Nothing is timed before its results were compared with the reference's. The library returns `results.Results`; `tables`,
`plot` and `document` make them readable.
"""
