"""Finding special and user-defined tokens in a text before anything else is done with it."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any


class SpecialTokenSplitter:
    """Cuts a text at the tokens that are written out in it: leftmost first, longest of those."""

    def __init__(self, *, always: Mapping[str, int], control: Mapping[str, int]) -> None:
        """`always`: tokens found in every text; `control`: only where the caller asks for them."""
        self._control_ids = frozenset(control.values())
        self._trie: dict[str, Any] = {}
        for text, token_id in (*always.items(), *control.items()):
            node = self._trie
            for character in text:
                node = node.setdefault(character, {})
            node[""] = token_id
        starts = "".join(map(re.escape, sorted(self._trie)))
        self._start = re.compile(f"[{starts}]") if starts else None

    def split(self, text: str, *, parse_special: bool) -> Iterator[str | int]:
        """Non-empty stretches of plain text and ids of tokens, in order."""
        begin = 0
        position = 0
        while self._start is not None and (candidate := self._start.search(text, position)):
            start = candidate.start()
            token_id, end = self._longest(text, start, parse_special)
            if token_id is None:
                position = start + 1
                continue
            if begin < start:
                yield text[begin:start]
            yield token_id
            begin = position = end
        if begin < len(text):
            yield text[begin:]

    def _longest(self, text: str, start: int, parse_special: bool) -> tuple[int | None, int]:
        found: int | None = None
        end = start
        node = self._trie
        for position in range(start, len(text)):
            child = node.get(text[position])
            if child is None:
                break
            node = child
            token_id = node.get("")
            if token_id is not None and (parse_special or token_id not in self._control_ids):
                found, end = token_id, position + 1
        return found, end


class FragmentEncoder:
    """A text encoder that cuts at special tokens and encodes what is between them."""

    def __init__(
        self, splitter: SpecialTokenSplitter, encode_fragment: Callable[[str, bool], list[int]]
    ) -> None:
        """`encode_fragment(text, at_start)`: ids of plain text; `at_start` says that it begins the
        text or follows a special token."""
        self._splitter = splitter
        self._encode_fragment = encode_fragment

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of `text`."""
        ids: list[int] = []
        at_start = True
        for fragment in self._splitter.split(text, parse_special=parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
                at_start = True
            else:
                ids.extend(self._encode_fragment(fragment, at_start))
                at_start = False
        return ids
