"""The JSON schema of a list of tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from polysilicon.server.errors import invalid


def calls_schema(tools: Mapping[str, Mapping[str, Any]], *, most: int | None) -> dict[str, Any]:
    """A list of one to `most` calls of the tools, which are given by name with the schemas of their
    arguments; references within those are led to their new place.

    Raises ApiError (400) for schemas that are nested too deeply."""
    calls = []
    for number, (name, parameters) in enumerate(tools.items()):
        place = f"#/items/anyOf/{number}/properties/arguments"
        try:
            arguments = _moved(parameters, place)
        except RecursionError:
            raise invalid(f"the parameters of tool {name!r} are nested too deeply") from None
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    whole: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if most is not None:
        whole["maxItems"] = most
    return whole


def _moved(value: Any, place: str) -> Any:
    """A schema that stands at `place` and no longer at the root."""
    if isinstance(value, list):
        return [_moved(item, place) for item in value]
    if not isinstance(value, Mapping):
        return value
    moved = {key: _moved(item, place) for key, item in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved
