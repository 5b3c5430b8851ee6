"""What a conversion did and why, as a page and as data."""
