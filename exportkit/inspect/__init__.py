"""What an artifact holds, and what differs between two. Nothing of an artifact is run or imported, but by `answers`."""
