"""Text that is held back while it may be the beginning of a tag."""

from __future__ import annotations


def split_at(text: str, tags: tuple[str, ...]) -> tuple[str, str | None, str]:
    """The text before the first of `tags`, that tag, and what follows it.

    Without one: the text that is certainly none of them, None, and the end that may begin one.
    """
    found = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
    if found:
        place, tag = min(found)
        return text[:place], tag, text[place + len(tag) :]
    held = max((_overlap(text, tag) for tag in tags), default=0)
    return text[: len(text) - held], None, text[len(text) - held :]


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` that begin `tag`."""
    for length in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
