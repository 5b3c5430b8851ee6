"""Records results of torch in ``tests/data``; run where torch is installed."""
