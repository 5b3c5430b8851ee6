"""What is known of numbers: rounding loss of constants, ranges, masks, overflow, integers held as floats."""
