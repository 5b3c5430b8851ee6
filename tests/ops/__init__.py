"""Tests of operators: gradients, lowering rules, decompositions, traits, operators of training."""
