"""All-pairs testing: of a test's combinations of parameters, enough for every pair of values.

After D. M. Cohen et al., "The AETG System: An Approach to Testing Based on Combinatorial Design"
(1997): most defects need two values together, few need three. Chosen greedily, in the order in
which the combinations stand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

Combination = Mapping[str, str]
"""Values by parameter, each by what it prints as."""


def cover_pairs(combinations: Sequence[Combination]) -> list[int]:
    """Places of combinations that have every pair of values that any of them has, in order.

    Combinations of one parameter are all kept, and those of none.
    """
    pairs = [frozenset(_pairs(combination)) for combination in combinations]
    missing = frozenset().union(*pairs)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(pairs)), key=lambda place: (len(pairs[place] & missing), -place))
        chosen.add(best)
        missing -= pairs[best]
    return sorted(chosen)


def _pairs(combination: Combination) -> Iterator[tuple[tuple[str, str], ...]]:
    """Pairs of values; where there is one value, or none, what stands for it alone."""
    values = sorted(combination.items())
    return itertools.combinations(values, min(2, len(values)))
