"""Tests of the conversion of models: calibration, tolerance, reports."""
