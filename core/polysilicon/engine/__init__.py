"""The step loop: requests in, tokens out."""
