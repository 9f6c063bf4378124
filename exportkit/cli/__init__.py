"""The command line: one module per command. The only place that imports click, prints or exits."""

from exportkit.cli.app import main

__all__ = ["main"]
