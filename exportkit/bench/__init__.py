"""Times operators and packages and their alternatives, on the same inputs in one run.

Results are compared with the reference's before anything is timed. The functions return `results.Results`, which
`tables` presents.
"""
