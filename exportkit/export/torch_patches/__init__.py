"""What export replaces or watches inside of torch. Below all else: other parts turn it on while they trace or run."""
