"""Serves packages: the Open Inference Protocol (version 2) over HTTP and gRPC.

`batching` chooses what runs next and knows neither HTTP nor torch. `protocol` reads and writes the protocol's messages.
`engine` loads packages and runs them. `http`, `rpc` and `page` are the ways in, and `server` is the process.
"""
