"""Looks for options with which compiled code is right, where exportkit's own make it wrong or do not compile."""
