"""The process in which chat templates run: `python chat_sandbox.py`, started by `chat.py`.

Templates come with model files and are hostile input. Jinja's sandbox keeps them from attributes
and changes; what it cannot bound (`"a" * 10 ** 10`, `10 ** 10 ** 10`, lists that double, a loop
that never ends, at compile time too) is bounded here by the operating system: this process has a
limit on memory, can write no file, has no environment, and is killed by its parent when a
rendering takes too long. It imports nothing of polysilicon and starts in tens of milliseconds.

Requests and replies are frames: 4 bytes of length (little-endian), then the payload. A request is
JSON; a reply is one byte, `+` for a rendered text and `-` for an error, and then UTF-8 text.
"""

import json
import os
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

MEMORY_BYTES = 1 << 30
MOST_OUTPUT_CHARACTERS = 16 << 20


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant said: a scope, no more."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block's body in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class PlainNamespace(jinja2.utils.Namespace):
    """`namespace()` that keeps no underscored names, which Python gives meanings of its own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *values = args
        attributes = dict(*values, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.TemplateError(f"a namespace may not hold {name!r}: it begins with _")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML's characters, which a model was not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = PlainNamespace
    environment.globals["dict"] = _new_dict
    return environment.from_string(source)


def _render(request: dict[str, Any]) -> str:
    template = _compiled(request["source"])
    if request["variables"] is None:
        return ""
    now = datetime.fromisoformat(request["now"])
    variables = {**request["variables"], "strftime_now": now.strftime}
    pieces: list[str] = []
    length = 0
    for piece in template.generate(**variables):
        pieces.append(piece)
        length += len(piece)
        if length > MOST_OUTPUT_CHARACTERS:
            raise jinja2.TemplateError(f"it writes more than {MOST_OUTPUT_CHARACTERS} characters")
    return "".join(pieces)


def _reply(payload: bytes) -> bytes:
    try:
        text = _render(json.loads(payload))
        return b"+" + text.encode("utf-8", "surrogatepass")
    except MemoryError:
        return b"-it needs more than %d MiB of memory" % (MEMORY_BYTES >> 20)
    except RecursionError:
        return b"-it is nested or calls itself too deeply"
    except jinja2.TemplateSyntaxError as error:
        return f"-line {error.lineno}: {error.message}".encode("utf-8", "replace")
    except Exception as error:
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        return f"-{kind}{str(error)[:2000]}".encode("utf-8", "replace")


def _limit_process() -> None:
    os.environ.clear()
    sys.dont_write_bytecode = True
    try:
        import resource
    except ImportError:
        return  # Windows: the parent's clock is the only limit.
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):
            continue  # A system that cannot set one limit still has the others.


def _read_frame(stream: BinaryIO) -> bytes | None:
    header = stream.read(4)
    if len(header) < 4:
        return None
    payload = stream.read(int.from_bytes(header, "little"))
    return payload


def main() -> None:
    """Answer requests until standard input ends."""
    _limit_process()
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    replies.write(b"+")
    replies.flush()
    while (payload := _read_frame(requests)) is not None:
        reply = _reply(payload)
        replies.write(len(reply).to_bytes(4, "little") + reply)
        replies.flush()


if __name__ == "__main__":
    main()
