"""Tests across rooms: a user's whole script, whole models, wrong order, wrong input."""
