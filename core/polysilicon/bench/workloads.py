"""What the load generator asks: prompts and output lengths, from a seed or from a file."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from polysilicon.errors import ConfigError

Units = NDArray[np.uint32]
"""A synthetic prompt: random numbers, each of which becomes one token id or one word."""

TRACE_BLOCK = 512
"""Tokens of a block of a Mooncake trace."""

_WORDS = (  # noqa: SIM905
    "the of and to in for is on that by this with you it not or be are from at as your all have "
    "new more an was we will home can us about if page my has search free but our one other do "
    "time they site he up may what which their news out use any there see only so his when here "
    "who web also now help get view first am been would how were some these like than find price "
    "date back top people had list name just over state year day into two health world next used "
    "go work last most music buy make them should system post her city add such please after best"
).split()
"""Common words, which most vocabularies hold as one token each."""

_CHARACTERS_PER_TOKEN = 4
"""Of English text; used where a recorded answer's length is known in characters only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ids:
    """Token ids from `low` up to, without, `high`, for servers that take them."""

    low: int
    high: int

    def render(self, units: Units) -> list[int]:
        rendered: list[int] = (self.low + units % np.uint32(self.high - self.low)).tolist()
        return rendered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Words, about one a token, for servers that take texts only."""

    def render(self, units: Units) -> str:
        return " ".join([_WORDS[index] for index in (units % np.uint32(len(_WORDS))).tolist()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyntheticPrompt:
    """`length` units: those of the segments one after another, each (stream, length). Equal streams
    of equal seed and salt begin alike; others share nothing."""

    seed: int
    segments: tuple[tuple[tuple[int, ...], int], ...]
    salt: int = 0

    @property
    def length(self) -> int:
        return sum(length for _, length in self.segments)

    def units(self) -> Units:
        return np.concatenate([self._segment(*segment) for segment in self.segments])

    def _segment(self, stream: tuple[int, ...], length: int) -> Units:
        random = np.random.default_rng([self.seed, self.salt, *stream])
        return random.integers(0, 1 << 32, length, dtype=np.uint32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """One request of a workload. at: seconds after the first, where the workload has times."""

    prompt: SyntheticPrompt | str
    output_tokens: int
    at: float | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt; an estimate where it is a text."""
        if isinstance(self.prompt, str):
            return max(1, len(self.prompt) // _CHARACTERS_PER_TOKEN)
        return self.prompt.length


# Streams of random numbers that must not meet.
_LENGTHS, _PREFIX, _PROMPT, _BLOCK, _ORDER, _WARM_UP = range(6)


def random_prompts(
    *,
    count: int,
    prompt_tokens: int,
    output_tokens: int,
    range_ratio: float,
    shared_prefix: int,
    num_prefixes: int,
    seed: int,
) -> list[Item]:
    """`count` prompts of random tokens.

    Lengths are uniform within +-range_ratio of those given; at 0 they are fixed. The first
    shared_prefix tokens of a prompt are one of num_prefixes common beginnings. Raises ConfigError
    when the prefix leaves no token of a prompt's own.
    """
    if not 0 <= range_ratio < 1:
        raise ConfigError("--range-ratio must be at least 0 and below 1")
    random = np.random.default_rng([seed, _LENGTHS])
    prompts = _lengths(random, prompt_tokens, range_ratio, count)
    outputs = _lengths(random, output_tokens, range_ratio, count)
    prefixes = random.integers(0, num_prefixes, count).tolist()
    if count and shared_prefix >= min(prompts):
        raise ConfigError(
            f"--shared-prefix must be shorter than the shortest prompt, of {min(prompts)} tokens"
        )
    items = []
    for index in range(count):
        own = ((_PROMPT, index), prompts[index] - shared_prefix)
        prefix = ((_PREFIX, prefixes[index]), shared_prefix)
        segments = (prefix, own) if shared_prefix else (own,)
        prompt = SyntheticPrompt(seed=seed, segments=segments)
        items.append(Item(prompt=prompt, output_tokens=outputs[index]))
    return items


def _lengths(random: np.random.Generator, length: int, range_ratio: float, count: int) -> list[int]:
    low = max(1, round(length * (1 - range_ratio)))
    high = round(length * (1 + range_ratio))
    drawn: list[int] = random.integers(low, high, count, endpoint=True).tolist()
    return drawn


def warm_up_prompts(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """`count` items of the lengths of the first ones, with tokens that those do not share."""
    warm = []
    for index in range(count):
        item = items[index % len(items)]
        segment = ((_WARM_UP, index), item.prompt_tokens)
        prompt = SyntheticPrompt(seed=seed, segments=(segment,))
        warm.append(Item(prompt=prompt, output_tokens=item.output_tokens))
    return warm


def salted(items: Sequence[Item], salt: int) -> list[Item]:
    """The same workload with other tokens, so that a server's prefix cache does not know them.
    Texts from a file stay as they are."""
    return [
        dataclasses.replace(item, prompt=dataclasses.replace(item.prompt, salt=salt))
        if isinstance(item.prompt, SyntheticPrompt)
        else item
        for item in items
    ]


class _TraceLine(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]]


def mooncake_trace(
    path: Path, *, count: int | None, length_scale: float, speed: float, seed: int
) -> list[Item]:
    """The first `count` requests of a Mooncake trace (None: all).

    A line holds timestamp (ms), input_length, output_length and hash_ids, one for each block of
    512 tokens of the prompt, the last one partly filled: equal ids stand for equal tokens. Source
    of the format: Qin et al., Mooncake, FAST'25. With `length_scale` a block has 512 * length_scale
    tokens (rounded) and prompts and outputs shrink alike, which keeps what is shared; with `speed`
    time runs that many times faster. Raises ConfigError for a file that is no such trace.
    """
    block = max(1, round(TRACE_BLOCK * length_scale))
    items: list[Item] = []
    first: float | None = None
    for place, line in _lines(path, count):
        try:
            entry = msgspec.json.decode(line, type=_TraceLine)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{place} is no line of a Mooncake trace: {error}") from None
        blocks = -(-entry.input_length // TRACE_BLOCK)
        if len(entry.hash_ids) != blocks:
            raise ConfigError(
                f"{place}: {entry.input_length} tokens are {blocks} blocks of {TRACE_BLOCK}, but "
                f"there are {len(entry.hash_ids)} hash_ids"
            )
        first = entry.timestamp if first is None else first
        last = entry.input_length - (blocks - 1) * TRACE_BLOCK
        sizes = [block] * (blocks - 1) + [-(-last * block // TRACE_BLOCK)]
        segments = tuple(
            ((_BLOCK, name), size) for name, size in zip(entry.hash_ids, sizes, strict=True)
        )
        items.append(
            Item(
                prompt=SyntheticPrompt(seed=seed, segments=segments),
                output_tokens=max(1, round(entry.output_length * length_scale)),
                at=max(0.0, entry.timestamp - first) / 1e3 / speed,
            )
        )
    if not items:
        raise ConfigError(f"{path} holds no requests")
    return sorted(items, key=lambda item: item.at or 0.0)


def sharegpt_prompts(path: Path, *, count: int, output_tokens: int | None, seed: int) -> list[Item]:
    """`count` first turns of recorded conversations, in an order drawn from the seed.

    The file is a JSON list or JSON lines of objects with `conversations` (turns of `from` and
    `value`, as ShareGPT has them) or `messages` (`role` and `content`). A conversation counts when
    its first turn is a user's; its answer's length, at four characters a token, is what is asked
    for unless output_tokens is given. Fewer conversations than `count` are repeated. Raises
    ConfigError for a file without usable ones.
    """
    pairs = [pair for entry in _entries(path) if (pair := _first_turns(entry)) is not None]
    if not pairs:
        raise ConfigError(
            f"{path} holds no conversation that begins with a user's turn and an answer "
            "(`conversations` of `from` and `value`, or `messages` of `role` and `content`)"
        )
    order = np.random.default_rng([seed, _ORDER]).permutation(len(pairs)).tolist()
    items = []
    for index in range(count):
        prompt, answer = pairs[order[index % len(order)]]
        tokens = output_tokens or max(1, len(answer) // _CHARACTERS_PER_TOKEN)
        items.append(Item(prompt=prompt, output_tokens=tokens))
    return items


def _first_turns(entry: object) -> tuple[str, str] | None:
    """The user's first text and the answer to it."""
    if not isinstance(entry, dict):
        return None
    turns = entry.get("conversations") or entry.get("messages")
    if not isinstance(turns, list):
        return None
    said = [turn for turn in turns[:3] if isinstance(turn, dict)]
    speakers = [turn.get("from", turn.get("role")) for turn in said]
    texts = [turn.get("value", turn.get("content")) for turn in said]
    if speakers and speakers[0] == "system":
        speakers, texts = speakers[1:], texts[1:]
    if len(texts) < 2 or speakers[0] not in ("human", "user") or speakers[1] == speakers[0]:
        return None
    prompt, answer = texts[:2]
    if not isinstance(prompt, str) or not isinstance(answer, str) or not prompt.strip():
        return None
    return prompt, answer


def _entries(path: Path) -> Iterator[object]:
    """The objects of a JSON list or of JSON lines."""
    with _open(path) as file:
        is_list = file.read(1) == b"["
        file.seek(0)
        try:
            if is_list:
                yield from msgspec.json.decode(file.read(), type=list[object])
            else:
                yield from msgspec.json.Decoder(object).decode_lines(file.read())
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path} is neither a JSON list nor lines of JSON: {error}") from None


def _lines(path: Path, count: int | None) -> Iterator[tuple[str, bytes]]:
    """Place and text of the first `count` lines that are not blank."""
    taken = 0
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if taken == count:
                return
            if line.strip():
                taken += 1
                yield f"{path}:{number}", line


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
