"""For people who write operators: the contract and its checks, what a library has, and new ones to start from.

The toolchain imports nothing of this package.
"""
