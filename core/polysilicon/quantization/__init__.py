"""Quantisation of dense weights: grids, rounding methods, calibration, writers of checkpoints."""
