"""What a model needs and how fast it can be at most: memory, ceilings, costs."""
