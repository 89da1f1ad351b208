"""The Metal backend: MLX on Apple's GPUs, and on a CPU for tests."""
