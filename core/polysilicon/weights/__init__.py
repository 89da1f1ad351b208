"""Checkpoints: files on disk read into the three canonical encodings."""
