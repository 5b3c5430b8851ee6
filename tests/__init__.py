"""The tests, in rooms like the package's."""
