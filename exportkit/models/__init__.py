"""Models included in exportkit."""
