"""Programs that are run by hand as well as by tests."""
