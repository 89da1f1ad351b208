"""What the HTTP process and the engine process say to each other: msgpack, one message a frame.

Requests are numbered by the HTTP process. The tokens that a step gave without anything else to tell
stand in one array; the rest of its news comes as `RequestOutput`s.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import msgspec

from polysilicon.engine.facts import ModelFacts
from polysilicon.engine.stats import EngineStats
from polysilicon.request import Request, RequestOutput

MOST_MESSAGE_BYTES = 1 << 28
"""Of one message; sockets refuse longer ones. The longest are log-probabilities of long prompts."""

_TOKEN = struct.Struct("<QII")


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all: sent as an array that begins with the tag."""


class Add(Message, frozen=True, tag="add"):
    """Serve a request. request: a `Request`, decoded apart so that one which does not fit is
    refused under its number."""

    number: int
    request: msgspec.Raw


class Cancel(Message, frozen=True, tag="cancel"):
    """End a request, or one choice of it; numbers that have ended are ignored."""

    number: int
    choice: int | None = None


class Check(Message, frozen=True, tag="check"):
    """Check the integrity of everything the engine keeps, and report it as `Checked`, behind the
    news of all commands that came before, with stats."""


class End(Message, frozen=True, tag="end"):
    """Exit now."""


Command = Add | Cancel | Check | End


class Loading(Message, frozen=True, tag="loading"):
    """How far loading is, in bytes."""

    done: int
    total: int


class Ready(Message, frozen=True, tag="ready"):
    """The model is loaded; commands are taken from now on."""

    facts: ModelFacts


class News(Message, frozen=True, tag="news"):
    """What came of one step, and that one was made. tokens: packed by `pack_tokens`. others: with
    the numbers of their requests. stats: now and then."""

    tokens: bytes
    others: tuple[tuple[int, RequestOutput], ...] = ()
    stats: EngineStats | None = None


class Checked(Message, frozen=True, tag="checked"):
    """What `Check` found wrong, or nothing."""

    error: str | None


class Failed(Message, frozen=True, tag="failed"):
    """The process is about to exit. kind: name of the PolysiliconError, empty for another error.
    reason: for the user."""

    kind: str
    reason: str


Report = Loading | Ready | News | Checked | Failed

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_request = msgspec.msgpack.Decoder(Request).decode


def pack_tokens(tokens: Sequence[tuple[int, int, int]]) -> bytes:
    """(number, choice, token) each, as u64, u32, u32, little-endian."""
    return b"".join(_TOKEN.pack(*token) for token in tokens)


def unpack_tokens(data: bytes) -> Iterator[tuple[int, int, int]]:
    """What `pack_tokens` packed. Raises ValueError for a broken length."""
    if len(data) % _TOKEN.size:
        raise ValueError(f"{len(data)} bytes are no whole number of tokens")
    return _TOKEN.iter_unpack(data)


def is_plain(output: RequestOutput) -> bool:
    """Whether an output tells one token and nothing else."""
    return (
        len(output.ids) == 1
        and output.finish_reason is None
        and output.times is None
        and not output.logprobs
        and not output.prompt_logprobs
        and not output.next_top
        and not output.num_cached_tokens
    )
