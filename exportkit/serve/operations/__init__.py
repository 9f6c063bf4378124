"""What an operator of a server needs: metrics, logs, traces, keys, TLS, and limits of connections."""
