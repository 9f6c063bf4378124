"""Compiles programs with AOTInductor, or finds the code in the cache."""
