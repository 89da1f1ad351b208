"""Which combinations of parameters stand for all of them."""

from __future__ import annotations

import itertools
import random
import re
import subprocess
import sys

from polysilicon.testing.pairs import cover_pairs


def pairs_of(combinations: list[dict[str, str]]) -> set[frozenset[tuple[str, str]]]:
    return {
        frozenset(pair)
        for combination in combinations
        for pair in itertools.combinations(combination.items(), min(2, len(combination)))
    }


def test_every_pair_is_there() -> None:
    """Of whole products and of what is left of them, and in few combinations."""
    random_ = random.Random(7)
    for sizes in ((1,), (4,), (2, 3), (7, 6, 7), (2, 2, 2, 5), (3, 1, 3, 2, 2)):
        whole = [
            {f"p{place}": str(value) for place, value in enumerate(values)}
            for values in itertools.product(*map(range, sizes))
        ]
        for combinations in (whole, random_.sample(whole, (len(whole) + 1) // 2)):
            kept = cover_pairs(combinations)
            assert kept == sorted(set(kept))
            chosen = [combinations[place] for place in kept]
            assert pairs_of(chosen) == pairs_of(combinations)
        largest, second = sorted([1, *sizes])[-2:][::-1]
        assert largest * second <= len(cover_pairs(whole)) <= 1.5 * largest * second
    assert cover_pairs([{}]) == [0]
    assert cover_pairs([]) == []


def test_the_kit_keeps_a_selection_of_each_test() -> None:
    """Tests without parameters, and with one, are all there; of three parameters, every pair."""

    def collected(*arguments: str) -> list[str]:
        finished = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-v"),
                *("--pyargs", "polysilicon.testing.conformance.test_linear"),
                *("--polysilicon-backend", "reference", *arguments),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        return re.findall(r"<Function (.*)>", finished.stdout)

    every, kept = collected(), collected("--polysilicon-pairs")
    assert set(kept) < set(every)
    for name in ("test_vectors_are_sharded_by_rows", "test_bias", "test_dense"):
        own = [test for test in every if test.startswith(name)]
        assert own
        assert set(own) <= set(kept)

    def variants(tests: list[str]) -> list[dict[str, str]]:
        pattern = re.compile(r"test_group_affine\[reference-(\w+)-(\w+)-(\w+)\]")
        return [
            dict(zip(("bits", "group", "variant"), match.groups(), strict=True))
            for match in map(pattern.fullmatch, tests)
            if match
        ]

    assert pairs_of(variants(kept)) == pairs_of(variants(every))
    assert 49 <= len(variants(kept)) < len(variants(every)) / 4
