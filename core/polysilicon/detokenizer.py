"""Text as it is generated: only whole characters, and never past a stop string."""

import codecs
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from polysilicon.errors import RequestError
from polysilicon.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class IncrementalDetokenizer:
    """Turns one sequence's tokens into text, piece by piece, in time linear in the new tokens.

    The pieces of `push` and the last of `flush` joined are what `Tokenizer.decode` gives for all
    the tokens. With `prompt_ids` they continue that prompt: what decoding prompt and tokens
    together gives, less the prompt's own text. With `exact` they are the text of the tokens' bytes,
    whatever came before, and no leading space is taken away.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        prompt_ids: Sequence[int] = (),
        exact: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_space = tokenizer.strip_leading_space and not exact
        context = b""
        for token_id in reversed(() if exact else prompt_ids):
            if len(context) >= _LONGEST_CHARACTER:
                break
            if token_id not in self._hidden:
                context = tokenizer.token_bytes(token_id) + context
        if context:
            # A character that the prompt began is completed by the tokens that follow.
            self._decoder.decode(context)
            self._strip_space = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; bytes of an unfinished character wait for more."""
        data = b"".join(
            self._tokenizer.token_bytes(token_id)
            for token_id in ids
            if token_id not in self._hidden
        )
        if self._strip_space and data:
            data = data.removeprefix(b" ")
            self._strip_space = False
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for a character that was never finished, else nothing. Ends the sequence."""
        return self._decoder.decode(b"", final=True)


@dataclass(slots=True)
class _Node:
    """One prefix of stop strings, in an Aho-Corasick automaton (Aho and Corasick 1975)."""

    depth: int
    children: dict[str, "_Node"]
    fallback: "_Node | None" = None
    stop: str | None = None
    """The longest stop string that ends here."""


class StopChecker:
    """Holds back text that may be the beginning of a stop string, and cuts at the first stop.

    The first stop is the one that is complete first, and of several that end at the same
    character the longest; so the result does not depend on how the text was cut into pieces.
    """

    def __init__(
        self,
        stops: Sequence[str],
        *,
        include: bool,
        may_stop: Callable[[str], bool] | None = None,
    ) -> None:
        """`include`: whether the stop string itself is part of the text that comes out. `may_stop`:
        whether the text may end before a stop string that was found, told what came since the last
        text that was let out; where it may not, the stop string is text like any other.

        Raises RequestError for an empty stop string.
        """
        if "" in stops:
            raise RequestError("a stop string is empty: leave it out")
        self._include = include
        self._may_stop = may_stop
        self._root = _automaton(tuple(stops))
        self._node = self._root
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, or None while there is none."""
        return self._matched

    def push(self, text: str) -> str:
        """The text that is now certain; nothing after a stop string was found."""
        if self._matched is not None:
            return ""
        if not self._root.children:
            return text
        node = self._node
        text_with_held = self._held + text
        for position, character in enumerate(text, len(self._held)):
            node = _step(self._root, node, character)
            end = position + 1
            stop = self._stop_at(node, text_with_held[:end])
            if stop is not None:
                self._matched = stop
                self._held = ""
                return text_with_held[: end if self._include else end - len(stop)]
        self._node = node
        certain = len(text_with_held) - node.depth
        self._held = text_with_held[certain:]
        return text_with_held[:certain]

    def _stop_at(self, node: _Node, text: str) -> str | None:
        """The longest stop string that ends `text` and may end it all."""
        if self._may_stop is None:
            return node.stop
        at: _Node | None = node
        while at is not None and at.stop is not None:
            if text.endswith(at.stop) and self._may_stop(text[: -len(at.stop)]):
                return at.stop
            at = at.fallback
        return None

    def flush(self) -> str:
        """The text held back, when no more is to come."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _step(root: _Node, node: _Node, character: str) -> _Node:
    while True:
        child = node.children.get(character)
        if child is not None:
            return child
        if node.fallback is None:
            return root
        node = node.fallback


@lru_cache(maxsize=16)  # The choices of a request share it; it never changes.
def _automaton(stops: tuple[str, ...]) -> _Node:
    root = _Node(0, {})
    for stop in stops:
        node = root
        for character in stop:
            node = node.children.setdefault(character, _Node(node.depth + 1, {}))
        node.stop = stop
    queue = deque(root.children.values())
    for node in queue:
        node.fallback = root
    while queue:
        node = queue.popleft()
        for character, child in node.children.items():
            assert node.fallback is not None
            child.fallback = _step(root, node.fallback, character)
            child.stop = child.stop or child.fallback.stop
            queue.append(child)
    return root
