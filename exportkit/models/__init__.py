"""Models that ship with exportkit."""
