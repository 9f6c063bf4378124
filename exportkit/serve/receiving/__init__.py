"""Processes that receive HTTP requests for the process that has the models.

One event loop of Python answers some thousand requests a second. Beside a GPU that is too few, so other processes
(receivers) speak HTTP and read and write the protocol. Bodies lie in memory that both processes map.
"""
