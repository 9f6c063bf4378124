"""Looks at operator libraries: what they register, and whether their operators keep the contract."""
