"""A table of libraries of operators that others wrote, tried from the list of their operators to a package."""
