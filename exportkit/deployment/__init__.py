"""Other ways to run packages than our own server: an application of Ray Serve, Triton with our backend."""
