"""Programs that measure; see RESULTS.md."""
