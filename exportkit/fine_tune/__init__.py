"""Another fine-tune's weights in a package of the same compiled code."""
