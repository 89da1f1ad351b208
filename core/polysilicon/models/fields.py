"""Bounded, typed reading of a model's parameters, which come from untrusted files."""

from polysilicon.weights.fields import Fields

__all__ = ["Fields"]
