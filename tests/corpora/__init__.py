"""Cases that several tests or recorders go through."""
