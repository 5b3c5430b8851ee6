"""The proof that a training step keeps its protocol."""
