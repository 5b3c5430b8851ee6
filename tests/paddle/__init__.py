"""Tests of Paddle's spelling, and against programs that Paddle's own passes were recorded on."""
