"""What is known of numbers: constants that do not survive, ranges, masks, what leaves a 16-bit type."""
