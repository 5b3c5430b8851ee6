"""The backward pass, and what of the forward pass it computes again."""
