"""The command line. Each command is one module. Only this package imports click, prints or exits."""

from exportkit.cli.app import main

__all__ = ["main"]
