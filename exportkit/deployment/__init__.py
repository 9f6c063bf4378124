"""Other ways to run packages than our own server: an application of Ray Serve, a model repository of Triton."""
