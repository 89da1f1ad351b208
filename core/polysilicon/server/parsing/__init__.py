"""Reasoning and tool calls, found in a model's text as it comes."""
