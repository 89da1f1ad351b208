"""Guesses at what a misspelt name was meant to be."""

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """`: did you mean 'x'?` when one of the known names is close, else nothing."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else ""
