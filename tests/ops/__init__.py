"""Tests of operators: gradients, forward bodies, decompositions, traits, operators of training."""
