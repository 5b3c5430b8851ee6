"""Models converted for inference."""
