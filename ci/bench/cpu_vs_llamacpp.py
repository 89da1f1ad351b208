"""polysilicon against llama.cpp on the same file, with the same number of threads, in pairs.

    python ci/bench/cpu_vs_llamacpp.py MODEL.gguf --backend cpu --threads 2 --json out.json

Needs llama-cpp-python, compiled for this machine, and a machine with nothing else to do. Ours is
`polysilicon bench throughput`, through the engine that serves, sampling included. llama.cpp's is
its batch interface, best of flash attention on and off, without sampling, each stream in a KV
buffer of its own: what it does best. The two sides live in processes of their own and take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import llama_cpp
import numpy as np

from polysilicon.bench.throughput import Load, measure
from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon_llamacpp.library import FLASH_ATTENTION, Model
from polysilicon_llamacpp.trial import extra_buffers_work

MODES = ("on", "off")
"""Of flash attention."""


class Ours:
    """polysilicon's side; lives in its own process as `_side`."""

    def __init__(self, model: Path, backend: str, options: dict[str, str], streams: int) -> None:
        config = Config(
            model=None, backend=backend, backend_option=options, max_sequences=max(streams, 1)
        )
        self.loaded: Loaded = load(config, model)

    def context(self) -> int:
        return self.loaded.engine.max_length

    def prefill(self, tokens: int, seed: int) -> float:
        return self._measure(tokens, 2, 1, seed).prefill_tokens_per_s

    def decode(self, streams: int, context: int, output: int, seed: int) -> float:
        return self._measure(context, output, streams, seed).decode_tokens_per_s

    def _measure(self, prompt: int, output: int, batch: int, seed: int):  # noqa: ANN202
        work = Load(prompt_tokens=prompt, output_tokens=output, batch=batch)
        return measure(self.loaded.client, self.loaded.engine, work, repeats=1, seed=seed)


class LlamaCpp:
    """llama.cpp's side; lives in its own process as `_side`."""

    def __init__(self, model: Path, threads: int) -> None:
        self.model = Model(model, extra_buffers=extra_buffers_work(model))
        self.threads = threads
        self._shape: tuple[int, ...] = ()
        self._contexts: dict[str, object] = {}

    def prefill(self, mode: str, tokens: int) -> float:
        context = self._context(mode, 1, tokens)
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        began = time.perf_counter()
        self._fill(context, tokens)
        return tokens / (time.perf_counter() - began)

    def decode(self, mode: str, streams: int, context_tokens: int, output: int) -> float:
        fresh = self._shape != (streams, context_tokens + output)
        context = self._context(mode, streams, context_tokens + output)
        memory = llama_cpp.llama_get_memory(context)
        if fresh or llama_cpp.llama_memory_seq_pos_max(memory, 0) < 0:
            self._fill(context, context_tokens)
            for stream in range(1, streams):
                llama_cpp.llama_memory_seq_cp(memory, 0, stream, -1, -1)
        batch = llama_cpp.llama_batch_init(streams, 0, 1)
        began = time.perf_counter()
        for step in range(output):
            if step == 1:
                # As with ours, the clock starts when every stream has its first token.
                began = time.perf_counter()
            self._step(context, batch, streams, context_tokens + step)
        seconds = time.perf_counter() - began
        llama_cpp.llama_batch_free(batch)
        for stream in range(streams):
            llama_cpp.llama_memory_seq_rm(memory, stream, context_tokens, -1)
        return streams * (output - 1) / seconds

    def _step(self, context: object, batch: object, streams: int, position: int) -> None:
        batch.n_tokens = streams
        for stream in range(streams):
            batch.token[stream] = (position * 31 + stream * 7) % self.model.vocab_size
            batch.pos[stream] = position
            batch.n_seq_id[stream] = 1
            batch.seq_id[stream][0] = stream
            batch.logits[stream] = 1
        _check(llama_cpp.llama_decode(context, batch))
        llama_cpp.llama_synchronize(context)

    def _fill(self, context: object, tokens: int) -> None:
        ids = np.random.default_rng(0).integers(0, self.model.vocab_size, tokens)
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
            _check(llama_cpp.llama_decode(context, batch))
        llama_cpp.llama_synchronize(context)
        llama_cpp.llama_batch_free(batch)

    def _context(self, mode: str, streams: int, tokens: int) -> object:
        """One context per mode is kept, of the shape that was asked for last."""
        if self._shape != (streams, tokens):
            for context in self._contexts.values():
                llama_cpp.llama_free(context)
            self._contexts.clear()
            self._shape = (streams, tokens)
        if mode not in self._contexts:
            parameters = llama_cpp.llama_context_default_params()
            parameters.n_ctx = streams * -(-tokens // 256) * 256
            parameters.n_batch = parameters.n_ubatch = 512
            parameters.n_seq_max = streams
            parameters.n_threads = parameters.n_threads_batch = self.threads
            parameters.flash_attn_type = FLASH_ATTENTION[mode]
            parameters.kv_unified = False
            context = llama_cpp.llama_init_from_model(self.model.pointer, parameters)
            if not context:
                raise RuntimeError(f"llama.cpp makes no context for {streams} streams")
            self._contexts[mode] = context
        return self._contexts[mode]


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"llama_decode failed with status {status}")


_side: Ours | LlamaCpp | None = None


def _start(kind: str, arguments: tuple[object, ...]) -> None:
    global _side
    _side = {"ours": Ours, "llamacpp": LlamaCpp}[kind](*arguments)  # type: ignore[arg-type]


def _call(method: str, arguments: tuple[object, ...]) -> float:
    return getattr(_side, method)(*arguments)


class Side:
    """The parent's end of a side."""

    def __init__(self, kind: str, *arguments: object) -> None:
        self._pool = ProcessPoolExecutor(
            1, mp_context=get_context("spawn"), initializer=_start, initargs=(kind, arguments)
        )

    def __call__(self, method: str, *arguments: object) -> float:
        return self._pool.submit(_call, method, arguments).result()


def compare(ours: Side, theirs: Side, options: argparse.Namespace) -> list[dict[str, object]]:
    """Every case, as rows of the table and the JSON."""
    longest = int(ours("context")) - 2
    prefills = sorted({min(tokens, longest) for tokens in options.prefill})
    cases = [("prefill", tokens, 1) for tokens in prefills]
    cases += [("decode", options.context, streams) for streams in options.streams]
    rows = []
    for work, tokens, streams in cases:
        runs: dict[str, list[float]] = {"ours": [], **{mode: [] for mode in MODES}}
        for repeat in range(options.repeats):
            if work == "prefill":
                runs["ours"].append(ours("prefill", tokens, repeat))
                for mode in MODES:
                    runs[mode].append(theirs("prefill", mode, tokens))
            else:
                runs["ours"].append(ours("decode", streams, tokens, options.output, repeat))
                for mode in MODES:
                    runs[mode].append(theirs("decode", mode, streams, tokens, options.output))
        best = max(MODES, key=lambda mode: statistics.median(runs[mode]))
        pairs = zip(runs["ours"], runs[best], strict=True)
        row = {
            "work": work,
            "tokens": tokens,
            "streams": streams,
            "ours": statistics.median(runs["ours"]),
            "llamacpp": statistics.median(runs[best]),
            "flash_attention": best,
            "ratio": statistics.median(a / b for a, b in pairs),
            "runs": runs,
        }
        print(
            f"{work:8} {tokens:7} {streams:8} {row['ours']:12,.1f} {row['llamacpp']:12,.1f}"
            f" {best:>5} {row['ratio']:8.2f}",
            flush=True,
        )
        rows.append(row)
    return rows


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefill", type=numbers, default=[512, 8192], metavar="512,8192")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32, 64], metavar="1,8,32,64")
    parser.add_argument("--context", type=int, default=512, help="tokens before decoding")
    parser.add_argument("--output", type=int, default=64, help="tokens decoded a stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = dict(pair.split("=", 1) for pair in options.backend_option)
    if options.backend == "cpu":
        chosen.setdefault("threads", str(options.threads))
    ours = Side("ours", options.model, options.backend, chosen, max(options.streams, default=1))
    theirs = Side("llamacpp", options.model, options.threads)
    print(f"{options.model.name}, {options.threads} threads, tokens/s, medians of pairs")
    print(
        f"{'work':8} {'tokens':>7} {'streams':>8} {'polysilicon':>12} {'llama.cpp':>12}"
        f" {'flash':>5} {'ratio':>8}"
    )
    rows = compare(ours, theirs, options)
    if options.json:
        report = {
            "model": options.model.name,
            "backend": options.backend,
            "backend_options": chosen,
            "threads": options.threads,
            "machine": platform.processor() or platform.machine(),
            "llama_cpp_python": llama_cpp.__version__,
            "llama_cpp": llama_cpp.llama_print_system_info().decode(),
            "cases": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
