"""Regular expressions of JSON schemas: what of them cannot be held, and those behind `format`.

Patterns are ECMA-262 in JSON Schema and are read in Rust's dialect by llguidance; where the two say
different things of the same text, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_GROUPS = {
    "=": "look-ahead",
    "!": "look-ahead",
    "<=": "look-behind",
    "<!": "look-behind",
}
_CLASS_OPERATORS = ("&&", "--", "~~")


def pattern_fault(pattern: str) -> str | None:
    """What of a pattern is not supported, in words, or None."""
    at = 0
    in_class = False
    while at < len(pattern):
        character = pattern[at]
        if character == "\\":
            escaped = pattern[at + 1 : at + 2]
            if not in_class and escaped in ("b", "B"):
                return f"the word boundary \\{escaped}, which is look-around"
            if not in_class and (escaped in "123456789" or escaped == "k") and escaped:
                return f"the back-reference \\{escaped}"
            at += 2
            continue
        if in_class:
            if character == "[":
                return "[ inside a class: write it \\["
            if pattern[at : at + 2] in _CLASS_OPERATORS:
                return f"{pattern[at : at + 2]} inside a class: escape it"
            if character == "]":
                in_class = False
        elif character == "[":
            in_class = True
            at += 1 + (pattern[at + 1 : at + 2] == "^")
            at += pattern[at : at + 1] == "]"
            continue
        elif pattern[at : at + 2] == "(?":
            for opening, name in _GROUPS.items():
                if pattern.startswith(opening, at + 2):
                    return f"{name} (?{opening}"
        at += 1
    return None


_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_TIME = (
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,6})?"
    "(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)

FORMAT_PATTERNS: Mapping[str, str] = MappingProxyType(
    {"date": f"^{_DATE}$", "time": f"^{_TIME}$", "date-time": f"^{_DATE}T{_TIME}$"}
)
"""Formats of RFC 3339 with leap years, and without what few readers take: the year 0, leap seconds,
lower-case letters, fractions below a microsecond."""

LIBRARY_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
"""Formats that llguidance holds as they are."""

FREE_FORMATS = frozenset({"password", "path", "file-path", "directory-path", "binary", "unknown"})
"""Formats that say what a text is for and nothing of its characters."""
