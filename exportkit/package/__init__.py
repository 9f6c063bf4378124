"""The package format: reading, writing and signing a `.pt2`. FORMAT.md has the rules; csrc/package checks them."""
