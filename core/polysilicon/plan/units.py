"""Numbers as people read them."""

from __future__ import annotations

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MOST = 1e30


def size(nbytes: float) -> str:
    """Bytes in the largest unit of which there is one: `1.5 GiB`."""
    unit, nbytes = 0, min(nbytes, _MOST)
    while nbytes >= 1024 and unit + 1 < len(_BYTES):
        nbytes, unit = nbytes / 1024, unit + 1
    return f"{nbytes:,.1f} {_BYTES[unit]}" if unit else f"{nbytes:,.0f} B"


def duration(seconds: float) -> str:
    """Seconds, or milliseconds below one."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"
