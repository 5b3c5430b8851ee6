"""Which operator runs in which precision, by lists and rules, and the casts that this takes."""
