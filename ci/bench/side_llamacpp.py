"""llama.cpp's side of a comparison: its batch interface, without sampling.

Streams have a KV buffer each, or one that is unified where they share a prefix: what it does best.
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from sides import serve

from polysilicon_llamacpp.library import FLASH_ATTENTION, Model
from polysilicon_llamacpp.trial import extra_buffers_work

COMPILER = re.compile(rb"(?:clang version|GCC: \([^)]{1,60}\)) [0-9.]+")
"""What compilers leave in the comment section of what they made."""


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        self._extra_buffers = extra_buffers_work(Path(model))
        self._model = Model(Path(model), extra_buffers=self._extra_buffers)
        self._threads = threads
        self._shape: tuple[int | bool, ...] = ()
        self._contexts: dict[str, object] = {}

    def build(self) -> dict[str, object]:
        """Which build of llama.cpp this is."""
        return {
            "llama_cpp_python": llama_cpp.__version__,
            "compiler": compiler(),
            "system": llama_cpp.llama_print_system_info().decode().strip(),
            "extra_buffers": self._extra_buffers,
        }

    def rate(
        self, mode: str, work: str, tokens: int, streams: int, output: int, seed: int
    ) -> float:
        """mode: flash attention `on` or `off`."""
        if work == "prefill":
            return self._prefill(mode, tokens, seed)
        return self._decode(mode, streams, tokens, output, shared=work == "shared")

    def _prefill(self, mode: str, tokens: int, seed: int) -> float:
        context = self._context(mode, 1, tokens, unified=False)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        began = time.perf_counter()
        self._fill(context, tokens, seed)
        return tokens / (time.perf_counter() - began)

    def _decode(self, mode: str, streams: int, tokens: int, output: int, *, shared: bool) -> float:
        context = self._context(mode, streams, tokens + output, unified=shared)
        memory = llama_cpp.llama_get_memory(context)
        if llama_cpp.llama_memory_seq_pos_max(memory, 0) < 0:
            self._fill(context, tokens, 0)
            for stream in range(1, streams):
                llama_cpp.llama_memory_seq_cp(memory, 0, stream, -1, -1)
        batch = llama_cpp.llama_batch_init(streams, 0, 1)
        began = time.perf_counter()
        for step in range(output):
            if step == 1:
                # As with ours, the clock starts when every stream has its first token.
                began = time.perf_counter()
            self._step(context, batch, streams, tokens + step)
        seconds = time.perf_counter() - began
        llama_cpp.llama_batch_free(batch)
        for stream in range(streams):
            llama_cpp.llama_memory_seq_rm(memory, stream, tokens, -1)
        return streams * (output - 1) / seconds

    def _step(self, context: object, batch: Any, streams: int, position: int) -> None:
        batch.n_tokens = streams
        for stream in range(streams):
            batch.token[stream] = (position * 31 + stream * 7) % self._model.vocab_size
            batch.pos[stream] = position
            batch.n_seq_id[stream] = 1
            batch.seq_id[stream][0] = stream
            batch.logits[stream] = 1
        check(llama_cpp.llama_decode(context, batch))
        llama_cpp.llama_synchronize(context)

    def _fill(self, context: object, tokens: int, seed: int) -> None:
        ids = np.random.default_rng(seed).integers(0, self._model.vocab_size, tokens)
        batch = llama_cpp.llama_batch_init(512, 0, 1)
        for start in range(0, tokens, 512):
            part = ids[start : start + 512].tolist()
            batch.n_tokens = len(part)
            for index, token in enumerate(part):
                batch.token[index] = token
                batch.pos[index] = start + index
                batch.n_seq_id[index] = 1
                batch.seq_id[index][0] = 0
                batch.logits[index] = start + index == tokens - 1
            check(llama_cpp.llama_decode(context, batch))
        llama_cpp.llama_synchronize(context)
        llama_cpp.llama_batch_free(batch)

    def _context(self, mode: str, streams: int, tokens: int, *, unified: bool) -> object:
        """One context per mode is kept, of the shape that was asked for last."""
        if self._shape != (streams, tokens, unified):
            for context in self._contexts.values():
                llama_cpp.llama_free(context)
            self._contexts.clear()
            self._shape = (streams, tokens, unified)
        if mode not in self._contexts:
            parameters = llama_cpp.llama_context_default_params()
            parameters.n_ctx = streams * -(-tokens // 256) * 256
            parameters.n_batch = parameters.n_ubatch = 512
            parameters.n_seq_max = streams
            parameters.n_threads = parameters.n_threads_batch = self._threads
            parameters.flash_attn_type = FLASH_ATTENTION[mode]
            parameters.kv_unified = unified
            context = llama_cpp.llama_init_from_model(self._model.pointer, parameters)
            if not context:
                raise RuntimeError(f"llama.cpp makes no context for {streams} streams")
            self._contexts[mode] = context
        return self._contexts[mode]


def check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"llama_decode failed with status {status}")


def compiler() -> str:
    """Of the library with the CPU's kernels: by its comment section, where clang's mark stands
    beside that of the system's start-up files, or by its OpenMP runtime where that was stripped."""
    paths = Path(llama_cpp.__file__).parent.rglob("libggml-cpu*")
    library = b"".join(path.read_bytes() for path in paths)
    marks = sorted({mark.decode() for mark in COMPILER.findall(library)}, reverse=True)
    if b"libomp.so" in library and not marks:
        return "clang (it uses libomp)"
    return marks[0] if marks else "an unknown compiler"


if __name__ == "__main__":
    serve(LlamaCpp)
