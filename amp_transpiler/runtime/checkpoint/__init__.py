"""State on disk: checkpoints and files of weights."""
