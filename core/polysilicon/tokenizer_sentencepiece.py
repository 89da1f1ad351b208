"""SentencePiece-style BPE: pieces are merged greedily by the score of what the merge makes."""

import heapq
import re
from collections.abc import Mapping, Sequence

SPACE = "▁"
_CACHED_WORDS = 65_536
_CACHED_WORD_LENGTH = 32


class SentencePieceMerger:
    """Turns text without special tokens into ids, as SentencePiece's BPE model does.

    Start from characters; again and again join the two neighbours whose joined text is the piece
    with the best score, the leftmost of equals, until no two neighbours make a piece. Characters
    that are no piece become byte tokens, or the unknown token. (Kudo and Richardson 2018; the
    algorithm is that of `bpe_model.cc` in SentencePiece.)

    Texts are cut into words first where that cannot change the result: before a `▁` that no piece
    has behind the character in front of it. Words are merged once and remembered.
    """

    def __init__(
        self,
        *,
        pieces: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Mapping[int, int],
        unknown_id: int | None,
        unused_ids: frozenset[int],
    ) -> None:
        """`pieces`: text to id of all that merging may make; `scores` by id, all finite.

        `byte_ids`: byte to the id of its fallback token. `unused_ids`: pieces that merging may
        pass through but that are taken apart again in the end.
        """
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._unused_ids = unused_ids
        joints = {
            match.group(1)
            for piece in pieces
            if piece.rfind(SPACE) > 0
            for match in re.finditer(f"([^{SPACE}]){SPACE}", piece)
        }
        joint_set = "".join(map(re.escape, sorted(joints)))
        glued = f"(?:(?<=[{joint_set}]){SPACE}+[^{SPACE}]*)*" if joints else ""
        self._word = re.compile(f"{SPACE}*[^{SPACE}]*{glued}")
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, in which spaces are already written as `▁`."""
        ids: list[int] = []
        cache = self._cache
        for word in self._word.findall(text):
            known = cache.get(word)
            if known is None:
                known = self._encode_word(word)
                if len(word) <= _CACHED_WORD_LENGTH:
                    if len(cache) >= _CACHED_WORDS:
                        cache.clear()
                    cache[word] = known
            ids.extend(known)
        return ids

    def _encode_word(self, word: str) -> tuple[int, ...]:
        whole = self._pieces.get(word) if len(word) == 1 else None
        if whole is not None and whole not in self._unused_ids:
            return (whole,)
        symbols, splits = self._merge(list(word))
        ids: list[int] = []
        for symbol in symbols:
            self._append_ids(symbol, splits, ids)
        return tuple(ids)

    def _merge(self, symbols: list[str]) -> tuple[list[str], dict[str, tuple[str, str]]]:
        """The final symbols, and how each unused piece on the way was made.

        Keeps a doubly linked list of live symbols and a heap of candidate joins; a join whose
        symbols have changed since it was pushed has another length and is dropped.
        """
        pieces, scores = self._pieces, self._scores
        count = len(symbols)
        before = list(range(-1, count - 1))
        after = [*range(1, count), -1]
        heap: list[tuple[float, int, int, int]] = []
        splits: dict[str, tuple[str, str]] = {}

        def consider(left: int, right: int) -> None:
            joined = symbols[left] + symbols[right]
            piece = pieces.get(joined)
            if piece is not None:
                heapq.heappush(heap, (-scores[piece], left, right, len(joined)))
                if piece in self._unused_ids:
                    splits[joined] = (symbols[left], symbols[right])

        for index in range(count - 1):
            consider(index, index + 1)
        while heap:
            _, left, right, length = heapq.heappop(heap)
            if (
                not symbols[left]
                or not symbols[right]
                or len(symbols[left]) + len(symbols[right]) != length
            ):
                continue
            symbols[left] += symbols[right]
            symbols[right] = ""
            following = after[right]
            after[left] = following
            if following >= 0:
                before[following] = left
                consider(left, following)
            if before[left] >= 0:
                consider(before[left], left)
        return [symbol for symbol in symbols if symbol], splits

    def _append_ids(
        self, symbol: str, splits: Mapping[str, tuple[str, str]], ids: list[int]
    ) -> None:
        stack = [symbol]
        while stack:
            part = stack.pop()
            piece = self._pieces.get(part)
            if piece is not None and piece in self._unused_ids and part in splits:
                stack.extend(reversed(splits[part]))
            elif piece is not None:
                ids.append(piece)
            else:
                self._append_bytes(part, ids)

    def _append_bytes(self, character: str, ids: list[int]) -> None:
        fallback = [self._byte_ids.get(byte) for byte in character.encode()]
        known = [token for token in fallback if token is not None]
        if len(known) == len(fallback):
            ids.extend(known)
        elif self._unknown_id is not None:
            ids.append(self._unknown_id)
