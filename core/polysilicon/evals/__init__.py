"""What a model says and how well: perplexity, divergence from a reference, tasks with answers."""
