"""Models run in fp32 and in faithful 16 bit, on samples, and what was measured."""
