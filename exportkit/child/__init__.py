"""Child processes: how they start and end, and how parent and child talk."""
