"""KV pages pass between backends: a prompt computed on one is continued on any other.

They pass as canonical blocks of 16 tokens between devices with different page sizes, and the tokens
that follow are those that the second backend gives alone; behind quantised KV, whose errors leave
many a token open, logits are. A backend that cannot run here is skipped with its reason.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.backend import KV_LARGEST_CODE, Device, Unavailable
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.models.loading import load_model
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.testing.engine_bench import COMPUTE_BOUNDS, STORE_BOUNDS, random_prompt
from polysilicon.testing.tiny_models import TinyModel, tiny_gemma, tiny_llama
from polysilicon.weights.checkpoint import open_checkpoint

BACKENDS: dict[str, tuple[str, int, dict[str, str]]] = {
    "reference": ("polysilicon.reference.plugin", 16, {}),
    "cpu": ("polysilicon_cpu.plugin", 32, {"activations": "f32"}),
    "metal": ("polysilicon_metal.plugin", 64, {"activations": "f32"}),
    "opencl": ("polysilicon_opencl.plugin", 128, {}),
    "cuda-host": ("polysilicon_cuda.host", 32, {"activations": "f32", "kernels": "torch"}),
}
"""By name: the module that supplies the backend, a page size and options. The last one is the torch
device in the host's memory."""

NAMES = list(BACKENDS)
MODELS = {model.name: model for model in (tiny_llama(), tiny_gemma())}
"""One KV group, and two, of which one has a window."""

KV_DTYPE = "f16"
BLOCK = 16
PROMPT = random_prompt(np.random.default_rng(5), 77)
NEW_TOKENS = 24
FOLLOWING = random_prompt(np.random.default_rng(6), 6)
"""Tokens that are put behind the prompt where logits are compared."""

REROUNDED = 0.5
"""For logits, whose standard deviation is 4: where a value lies between two codes, each backend may
store another, and one such code was seen to change a logit by 0.03."""


Logits = npt.NDArray[np.float32]
Blocks = list[npt.NDArray[np.uint8]]
"""By KV group, uint8 `[blocks, block_bytes]`."""


class Side:
    """A tiny model on one backend. Each origin of a prompt's KV has pages of its own there."""

    def __init__(
        self, device: Device, model: TinyModel, folder: Path, page_size: int, kv_dtype: str
    ) -> None:
        self.bound = COMPUTE_BOUNDS[device.capabilities.compute]
        self.page_size = page_size
        length = len(PROMPT) + NEW_TOKENS
        self.pages = -(-length // page_size)
        with open_checkpoint(folder) as checkpoint:
            loaded = load_model(checkpoint, device, max_length=length)
        specs = loaded.kv_specs(page_size, kv_dtype)
        self.executor = ModelExecutor(
            device=device,
            model=loaded,
            specs=specs,
            pages=[(len(BACKENDS) + 1) * self.pages + 1] * len(specs),
            max_sequences=1,
        )

    def page_table(self, origin: int) -> list[int]:
        first = origin * self.pages + 1
        return list(reversed(range(first, first + self.pages)))

    def forward(self, tokens: tuple[int, ...], start: int, table: list[int]) -> Logits:
        """Compute tokens behind `start` others; the logits of the next one."""
        groups = len(self.executor.pools)
        chunk = Chunk(tokens=tokens, start=start, pages=[table] * groups)
        batch = make_batch([chunk], [self.page_size] * groups, logit_rows=[len(tokens) - 1])
        logits: Logits = self.executor.program(batch, None).result().logits[0]
        return logits

    @functools.cached_property
    def prefilled(self) -> tuple[int, Blocks]:
        """The first token behind the prompt, and the blocks of the prompt."""
        table = self.page_table(0)
        token = int(self.forward(PROMPT, 0, table).argmax())
        blocks = []
        for pool in self.executor.pools:
            spec = pool.spec
            shape = self.pages, self.page_size // BLOCK, spec.block_bytes
            read = np.zeros(shape, np.uint8)
            pool.read(table, read).result()
            blocks.append(read.reshape(-1, spec.block_bytes)[: -(-len(PROMPT) // BLOCK)])
        return token, blocks

    @functools.cached_property
    def alone(self) -> list[int]:
        """Tokens behind the prompt that was computed here."""
        return self.decode(self.prefilled[0], self.page_table(0))

    def written(self, origin: int, blocks: Blocks) -> list[int]:
        """The page table of a prompt whose KV comes from elsewhere."""
        table = self.page_table(origin + 1)
        for pool, given in zip(self.executor.pools, blocks, strict=True):
            # Whole pages are written: behind the prompt's blocks its last one stands again.
            wanted = np.minimum(np.arange(self.pages * self.page_size // BLOCK), len(given) - 1)
            pool.write(table, given[wanted].reshape(self.pages, -1, given.shape[1])).result()
        return table

    def continued(self, origin: int, token: int, blocks: Blocks) -> list[int]:
        """Tokens behind such a prompt, of which `token` is the first."""
        return self.decode(token, self.written(origin, blocks))

    def decode(self, token: int, table: list[int]) -> list[int]:
        tokens = [token]
        for position in range(len(PROMPT), len(PROMPT) + NEW_TOKENS - 1):
            tokens.append(int(self.forward((tokens[-1],), position, table).argmax()))
        return tokens

    def logits(self, table: list[int]) -> Logits:
        """`[n, V]` of the tokens `FOLLOWING` behind the prompt."""
        length = len(PROMPT)
        rows = [self.forward((t,), length + i, table) for i, t in enumerate(FOLLOWING)]
        return np.stack(rows)


@pytest.fixture(scope="module")
def side(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Side]]:
    """Opens backends, each once, and loads models onto them; skips where one cannot run."""
    folder = tmp_path_factory.mktemp("models")
    for name, model in MODELS.items():
        model.write(folder / name)
    opened: list[Device] = []

    @functools.cache
    def open_device(name: str) -> Device | str:
        module, _, options = BACKENDS[name]
        try:
            (backend,) = importlib.import_module(module).polysilicon_backends()
        except ModuleNotFoundError as error:
            return f"{error.name} is not installed"
        found = backend.probe()
        if isinstance(found, Unavailable):
            return found.reason
        opened.append(backend.open(0, options))
        return opened[-1]

    @functools.cache
    def load(name: str, model: str, kv_dtype: str) -> Side | str:
        device = open_device(name)
        if isinstance(device, str):
            return device
        return Side(device, MODELS[model], folder / model, BACKENDS[name][1], kv_dtype)

    def side(name: str, model: str, kv_dtype: str = KV_DTYPE) -> Side:
        loaded = load(name, model, kv_dtype)
        if isinstance(loaded, str):
            pytest.skip(f"{name}: {loaded}")
        return loaded

    yield side
    for device in opened:
        device.close()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(NAMES, 2)))
def test_a_prompt_is_continued_on_another_backend(
    side: Callable[..., Side], first: str, second: str, model: str
) -> None:
    prefill, decode = side(first, model), side(second, model)
    tokens = decode.continued(NAMES.index(first), *prefill.prefilled)
    logits = MODELS[model].logits([*PROMPT, *decode.alone], kv_dtype=KV_DTYPE)[len(PROMPT) - 1 :]
    bound = prefill.bound + decode.bound + STORE_BOUNDS[KV_DTYPE]
    for index, (given, alone) in enumerate(zip(tokens, decode.alone, strict=True)):
        second_best, best = np.sort(logits[index])[-2:]
        if best - second_best <= bound:
            # Either may come here, and what follows is another text.
            assert index >= NEW_TOKENS // 2, "this prompt's margins say too little"
            break
        assert given == alone, f"token {index} of {tokens}, alone {decode.alone}"


@pytest.mark.parametrize("model", MODELS)
def test_tokens_follow_from_the_pages_written(side: Callable[..., Side], model: str) -> None:
    reference = side("reference", model)
    token, blocks = reference.prefilled
    exchanged = [given[::-1] for given in blocks]
    assert reference.continued(0, token, blocks) == reference.alone
    assert reference.continued(0, token, exchanged) != reference.alone


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kv_dtype", KV_LARGEST_CODE)
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(NAMES, 2)))
def test_quantised_pages_mean_the_same_on_another_backend(
    side: Callable[..., Side], first: str, second: str, kv_dtype: str, model: str
) -> None:
    prefill, decode = side(first, model, kv_dtype), side(second, model, kv_dtype)
    (_, blocks), _ = prefill.prefilled, decode.prefilled
    own = decode.logits(decode.page_table(0))
    given = decode.logits(decode.written(NAMES.index(first), blocks))
    bound = prefill.bound + decode.bound + REROUNDED
    assert np.abs(given - own).max() <= bound
    others = [block.copy() for block in blocks]
    for block, pool in zip(others, decode.executor.pools, strict=True):
        block[:, len(pool.spec.block_header()) :] = 0
    without = decode.logits(decode.written(NAMES.index(first), others))
    assert np.abs(without - own).max() > 4 * bound
