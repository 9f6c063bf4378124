"""Replaces libraries or weights of a package, and keeps everything else byte for byte."""
