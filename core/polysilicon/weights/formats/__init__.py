"""Readers of quantised safetensors checkpoints, one file a format."""
