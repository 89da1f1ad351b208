"""Measuring the engine under made loads."""
