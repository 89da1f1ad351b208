"""Anthropic's HTTP interface."""
