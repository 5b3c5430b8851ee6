"""The assignment of precision that moves the fewest bytes, by minimum cut."""
