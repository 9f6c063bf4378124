"""Dynamic sizes: how they are written, what follows from them, and what torch.export concluded."""
