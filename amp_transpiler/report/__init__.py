"""What a conversion did and why, as data, as JSON and as a page."""
