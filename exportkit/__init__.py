"""From a PyTorch module with custom operators to one verified, self-contained .pt2."""

__version__ = "0.1.0"
