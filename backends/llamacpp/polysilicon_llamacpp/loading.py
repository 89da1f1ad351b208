"""From a file and settings to an executor: sizes, and which buffers llama.cpp may use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from polysilicon_llamacpp.executor import LlamaCppExecutor
from polysilicon_llamacpp.library import FLASH_ATTENTION, KV_TYPES, Context, Model
from polysilicon_llamacpp.sequences import MAX_SEQUENCES
from polysilicon_llamacpp.trial import extra_buffers_work

if TYPE_CHECKING:
    from polysilicon.executor import ExecutorSettings

DEFAULT_TOKENS = 16384
"""Tokens of KV when nothing is said. Every step looks through all that are in use, whosever they
are, so that more cost time too."""

MOST_ROWS = 128
"""Sequences that may run at once: as many of llama.cpp's are left for pages."""

PAGE_STEP = 16


def load(path: Path, settings: ExecutorSettings) -> LlamaCppExecutor:
    """Raises ValueError, in words that name the mend, and OutOfMemory."""
    threads, flash_attention = _options(settings.options)
    kv_dtype = settings.kv_dtype or next(iter(KV_TYPES))
    if kv_dtype not in KV_TYPES:
        raise ValueError(f"--kv-dtype {kv_dtype} is not one of {', '.join(KV_TYPES)}")
    if settings.max_sequences > MOST_ROWS:
        raise ValueError(
            f"llama.cpp has {MAX_SEQUENCES} sequences, of which {MOST_ROWS} can run at once: lower "
            "--max-sequences"
        )
    extra_buffers = extra_buffers_work(path)
    model = Model(path, extra_buffers=extra_buffers)
    try:
        refusal = model.refusal()
        if refusal:
            raise ValueError(
                f"{path} cannot be served by pages of KV, because {refusal}: choose a model with "
                "a decoder of attention layers alone"
            )
        notes = []
        if not extra_buffers:
            notes.append(
                "llama.cpp crashed with its extra buffers (AMX) in a trial and runs without them: "
                "compile llama-cpp-python with clang, or gcc 13 or later"
            )
        page_size, pages = _pages(model, settings, kv_dtype)
        capacity = page_size * (pages - 1)
        wanted = _length(model, settings)
        if capacity < wanted:
            notes.append(
                f"the context is {capacity:,} tokens, not {wanted:,}: the KV pages hold no more "
                "(--kv-memory, --max-length)"
            )
        context = Context(
            model,
            cells=capacity,
            tokens=settings.step_tokens + settings.max_sequences,
            sequences=settings.max_sequences + pages - 1,
            kv_dtype=kv_dtype,
            threads=threads,
            flash_attention=flash_attention,
        )
    except BaseException:
        model.close()
        raise
    return LlamaCppExecutor(
        context,
        max_sequences=settings.max_sequences,
        page_size=page_size,
        pages=pages,
        max_length=min(wanted, capacity),
        kv_dtype=kv_dtype,
        notes=tuple(notes),
    )


def _options(options: Mapping[str, str]) -> tuple[int, str]:
    known = {"threads", "flash_attention"}
    for name in options:
        if name not in known:
            raise ValueError(f"unknown option {name!r}: known are {', '.join(sorted(known))}")
    threads = options.get("threads", str(_cores()))
    if not re.fullmatch(r"[1-9]\d{0,3}", threads):
        raise ValueError(f"threads is {threads!r}: write a number from 1 to 9999")
    flash_attention = options.get("flash_attention", "auto")
    if flash_attention not in FLASH_ATTENTION:
        raise ValueError(
            f"flash_attention is {flash_attention!r}: write {', '.join(FLASH_ATTENTION)}"
        )
    return int(threads), flash_attention


def _cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _length(model: Model, settings: ExecutorSettings) -> int:
    length = settings.max_length or model.max_position
    if length > model.max_position:
        raise ValueError(
            f"the model was trained for {model.max_position:,} tokens of context: lower "
            "--max-length"
        )
    return length


def _pages(model: Model, settings: ExecutorSettings, kv_dtype: str) -> tuple[int, int]:
    """(page size, pages with page 0). Few and large: each page is one of llama.cpp's sequences."""
    most = MAX_SEQUENCES - settings.max_sequences
    largest = None
    if model.window:
        # A page that lies within the window is never behind its own end.
        largest = (model.window - 1) // PAGE_STEP * PAGE_STEP or max(model.window - 1, 1)
    if settings.kv_pages is not None:
        size = settings.page_size or PAGE_STEP
        count = settings.kv_pages - 1
        if count > most:
            raise ValueError(
                f"--kv-pages is at most {most + 1} beside {settings.max_sequences} sequences: "
                "lower it, and raise --page-size"
            )
    else:
        if settings.kv_memory is not None:
            tokens = settings.kv_memory // model.token_bytes(kv_dtype)
        else:
            tokens = DEFAULT_TOKENS
        tokens = min(tokens, settings.max_sequences * _length(model, settings))
        size = settings.page_size or max(-(-tokens // most) // PAGE_STEP * PAGE_STEP, PAGE_STEP)
        if largest is not None and settings.page_size is None:
            size = min(size, largest)
        count = min(-(-tokens // size), most)
        if not tokens:
            raise ValueError("--kv-memory holds not even one token: raise it")
    if largest is not None and size > largest:
        raise ValueError(
            f"--page-size is at most {largest} for a sliding window of {model.window}: lower it"
        )
    return size, count + 1
