"""Times the operators beside their alternatives: references, torch.compile and library functions."""
