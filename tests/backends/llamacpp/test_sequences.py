"""Pages as sequences: random traffic over cells that only remember tokens. Needs no llama.cpp."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np
import pytest

from polysilicon.engine.engine import Engine
from polysilicon.kv import GroupSpec, KVManager
from polysilicon.request import FinishReason, Request, SamplingParams
from polysilicon_llamacpp.executor import LlamaCppExecutor

VOCABULARY = 50


@dataclasses.dataclass(eq=False)
class Cell:
    position: int
    token: int
    sequences: set[int]


class Model:
    vocab_size = VOCABULARY
    window = 0

    def close(self) -> None:
        pass


class Cells:
    """llama.cpp's unified cache: what it keeps, what it refuses, and logits that depend on every
    token that a sequence has."""

    def __init__(self, size: int) -> None:
        self.model = Model()
        self.size = size
        self.cells: list[Cell] = []
        self.most = 0

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        for cell in self.cells:
            if source in cell.sequences and start <= cell.position < stop:
                cell.sequences.add(target)

    def remove(self, sequence: int, start: int, stop: int) -> None:
        for cell in self.cells:
            if start <= cell.position and (stop < 0 or cell.position < stop):
                cell.sequences.discard(sequence)
        self.cells = [cell for cell in self.cells if cell.sequences]

    def held(self, sequence: int) -> list[int]:
        """A sequence's tokens; its positions must be 0, 1, 2 ..."""
        cells = sorted(
            (cell for cell in self.cells if sequence in cell.sequences), key=lambda c: c.position
        )
        assert [cell.position for cell in cells] == list(range(len(cells)))
        return [cell.token for cell in cells]

    def decode(
        self, tokens: np.ndarray, positions: np.ndarray, sequences: np.ndarray, rows: np.ndarray
    ) -> np.ndarray:
        assert len(self.cells) + len(tokens) <= self.size, "more cells than pages have slots"
        for sequence in set(sequences.tolist()):
            wanted = positions[sequences == sequence].tolist()
            start = len(self.held(sequence))
            assert wanted == list(range(start, start + len(wanted)))
        for token, position, sequence in zip(tokens, positions, sequences, strict=True):
            self.cells.append(Cell(int(position), int(token), {int(sequence)}))
        self.most = max(self.most, len(self.cells))
        logits = np.zeros((len(rows), VOCABULARY), np.float32)
        for index, row in enumerate(rows):
            seen = self.held(int(sequences[row]))[: int(positions[row]) + 1]
            logits[index, next_token(seen)] = 1
        return logits

    def close(self) -> None:
        pass


def next_token(tokens: Sequence[int]) -> int:
    digest = hashlib.blake2b(np.array(tokens, "<i4").tobytes(), digest_size=4).digest()
    return int.from_bytes(digest) % VOCABULARY


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("rows", "pages", "page_size"), [(3, 12, 4), (6, 24, 4), (8, 9, 16)])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic(
    rows: int, pages: int, page_size: int, prefix_cache: bool, seed: int
) -> None:
    rng = np.random.default_rng([seed, rows])
    max_length = min((pages - 1) * page_size, 60)
    cells = Cells((pages - 1) * page_size)
    executor = LlamaCppExecutor(
        cells,  # type: ignore[arg-type]
        max_sequences=rows,
        page_size=page_size,
        pages=pages,
        max_length=max_length,
        kv_dtype="f16",
    )
    engine = Engine(
        executor=executor,
        kv=KVManager(
            groups=[GroupSpec(name="full", pages=pages, window=None)],
            page_size=page_size,
            max_sequences=rows,
            max_length=max_length,
            prefix_cache=prefix_cache,
        ),
        eos_ids=frozenset(),
        step_tokens=int(rng.choice([5, 16, 64])),
        max_length=max_length,
        model_identity="fake",
        kv_dtype="f16",
        run_ahead=False,
    )
    beginnings = [rng.integers(0, VOCABULARY, 40).tolist() for _ in range(3)]
    requests: dict[str, Request] = {}
    answers: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], FinishReason] = {}
    for serial in range(60):
        beginning = beginnings[rng.integers(3)][: rng.integers(0, 40)]
        own = rng.integers(0, VOCABULARY, rng.integers(1, 8)).tolist()
        count = int(rng.integers(1, 12))
        request = Request(
            id=str(serial),
            prompt=tuple(beginning + own),
            params=SamplingParams(
                temperature=0.0, max_tokens=count, ignore_eos=True, n=int(rng.integers(1, 3))
            ),
        )
        if len(request.prompt) + count <= max_length:
            requests[request.id] = request
            engine.add(request)
        if rng.random() < 0.15 and requests:
            engine.cancel(rng.choice(list(requests)))
        for _ in range(rng.integers(0, 6)):
            take(engine, answers, ends)
    while engine.has_work:
        take(engine, answers, ends)
    done = 0
    for request in requests.values():
        for choice in range(request.params.n):
            expected = continuation(request.prompt, request.params.max_tokens or 0)
            got = answers.get((request.id, choice), [])
            if ends[request.id, choice] is FinishReason.LENGTH:
                done += 1
                assert got == expected
            else:
                assert ends[request.id, choice] is FinishReason.CANCELLED
                assert got == expected[: len(got)]
    assert done > 20
    assert cells.most > cells.size // 2


def take(
    engine: Engine,
    answers: dict[tuple[str, int], list[int]],
    ends: dict[tuple[str, int], FinishReason],
) -> None:
    for output in engine.step():
        assert output.error is None
        answers.setdefault((output.request_id, output.choice), []).extend(output.ids)
        if output.finish_reason is not None:
            ends[output.request_id, output.choice] = output.finish_reason
    engine.kv.check_integrity()
