"""llama.cpp itself: the functions used, loaded models and contexts, and what it logs."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import numpy.typing as npt

from polysilicon.backend import DeviceLost, OutOfMemory
from polysilicon_llamacpp.sequences import MAX_SEQUENCES

Int32 = npt.NDArray[np.int32]

KV_TYPES = {"f16": 1, "f32": 0, "bf16": 30}
"""ggml's numbers of the types that keys and values may be stored in, the default first."""

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}

_ERROR = 4
_NEEDED = (
    "llama_decode", "llama_init_from_model", "llama_log_set", "llama_memory_seq_cp",
    "llama_memory_seq_rm", "llama_model_is_hybrid", "llama_model_load_from_file",
    "llama_model_n_swa", "llama_vocab_n_tokens",
)  # fmt: skip
_MEND = "pip install -U llama-cpp-python"


class LibraryError(Exception):
    """llama.cpp cannot be used here; the message names the mend."""


def check() -> None:
    """Raises LibraryError unless the installed llama-cpp-python has what is needed."""
    try:
        import llama_cpp
    except Exception as error:
        text = " ".join(str(error).split())
        raise LibraryError(f"llama-cpp-python cannot be imported ({text:.200}): {_MEND}") from error
    missing = [name for name in _NEEDED if not hasattr(llama_cpp, name)]
    fields = {name for name, *_ in llama_cpp.llama_context_params._fields_}
    missing += sorted({"kv_unified", "swa_full", "flash_attn_type"} - fields)
    if missing:
        raise LibraryError(f"llama-cpp-python is too old, it lacks {missing[0]}: {_MEND}")
    if llama_cpp.llama_max_parallel_sequences() < MAX_SEQUENCES:
        raise LibraryError(f"llama.cpp is built for fewer than 256 sequences: {_MEND}")


class _Log:
    """Keeps llama.cpp off the terminal, and its complaints for error messages."""

    def __init__(self) -> None:
        import llama_cpp

        self.complaints: list[str] = []
        self._callback = llama_cpp.llama_log_callback(self._take)
        llama_cpp.llama_log_set(self._callback, ctypes.c_void_p(0))

    def _take(self, level: int, text: bytes, user_data: object) -> None:
        if level == _ERROR:
            del self.complaints[8:]
            self.complaints.append(" ".join(text.decode(errors="replace").split()))

    def cause(self) -> str:
        """The first complaint; those that follow come of it."""
        return next((text[:300] for text in self.complaints if text), "it does not say why")


_log: _Log | None = None


def start_logging() -> _Log:
    """The process's log, made at the first call; llama.cpp has one for all models."""
    global _log
    if _log is None:
        _log = _Log()
    return _log


class Model:
    """A loaded GGUF file. Raises ValueError when llama.cpp refuses it."""

    def __init__(self, path: Path, *, extra_buffers: bool = True) -> None:
        import llama_cpp

        self.path = path
        log = start_logging()
        log.complaints.clear()
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = extra_buffers
        self.pointer = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self.pointer:
            raise ValueError(
                f"llama.cpp cannot load {path}: {log.cause()}. Take another file, or a newer "
                f"llama.cpp ({_MEND})"
            )
        self.vocab_size = int(
            llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.pointer))
        )
        self.max_position = int(llama_cpp.llama_model_n_ctx_train(self.pointer))
        self.window = int(llama_cpp.llama_model_n_swa(self.pointer))

    def refusal(self) -> str | None:
        """Why the model cannot run on pages, None when it can."""
        import llama_cpp

        for kind, found in (
            ("an encoder", llama_cpp.llama_model_has_encoder(self.pointer)),
            ("no decoder", not llama_cpp.llama_model_has_decoder(self.pointer)),
            ("recurrent layers", llama_cpp.llama_model_is_recurrent(self.pointer)),
            ("recurrent layers", llama_cpp.llama_model_is_hybrid(self.pointer)),
            ("a diffusion decoder", llama_cpp.llama_model_is_diffusion(self.pointer)),
        ):
            if found:
                return f"it has {kind}"
        return None

    def token_bytes(self, kv_dtype: str) -> int:
        """About what the keys and values of one token take."""
        import llama_cpp

        heads = int(llama_cpp.llama_model_n_head(self.pointer))
        width = int(llama_cpp.llama_model_n_embd(self.pointer)) // max(heads, 1)
        architecture = self._metadata("general.architecture")
        dims = [
            int(self._metadata(f"{architecture}.attention.{name}_length") or width)
            for name in ("key", "value")
        ]
        size = 4 if kv_dtype == "f32" else 2
        layers = int(llama_cpp.llama_model_n_layer(self.pointer))
        return layers * int(llama_cpp.llama_model_n_head_kv(self.pointer)) * sum(dims) * size

    def close(self) -> None:
        import llama_cpp

        if self.pointer:
            llama_cpp.llama_model_free(self.pointer)
            self.pointer = None

    def _metadata(self, key: str) -> str:
        import llama_cpp

        buffer = ctypes.create_string_buffer(128)
        size = llama_cpp.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if size > 0 else ""


class Context:
    """A model's KV cells and batches of up to `tokens` tokens; also the `Cells` of its memory.

    Raises OutOfMemory when llama.cpp cannot allocate it.
    """

    def __init__(
        self,
        model: Model,
        *,
        cells: int,
        tokens: int,
        sequences: int,
        kv_dtype: str,
        threads: int,
        flash_attention: str,
    ) -> None:
        import llama_cpp

        self.model = model
        log = start_logging()
        log.complaints.clear()
        # llama.cpp aborts when a batch has room for fewer tokens than there are sequences.
        tokens = max(tokens, sequences)
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = cells
        parameters.n_ctx = cells
        parameters.n_batch = tokens
        # A micro-batch finds its cells before it fills any: none of a step's own is taken for one
        # that fell behind a sliding window.
        parameters.n_ubatch = tokens
        parameters.n_seq_max = sequences
        parameters.n_threads = parameters.n_threads_batch = threads
        parameters.type_k = parameters.type_v = KV_TYPES[kv_dtype]
        parameters.flash_attn_type = FLASH_ATTENTION[flash_attention]
        parameters.kv_unified = True
        parameters.swa_full = True
        self.pointer = llama_cpp.llama_init_from_model(model.pointer, parameters)
        if not self.pointer:
            raise OutOfMemory(f"llama.cpp made no context of {cells:,} tokens: {log.cause()}")
        self._memory = llama_cpp.llama_get_memory(self.pointer)
        self._tokens, self._positions, self._sequences, self._counts = np.zeros(
            (4, tokens), np.int32
        )
        self._counts[:] = 1
        self._outputs = np.zeros(tokens, np.int8)
        self._addresses = (
            self._sequences.ctypes.data + 4 * np.arange(tokens, dtype=np.uint64)
        ).astype(np.uint64)
        self._batch = llama_cpp.llama_batch(
            n_tokens=0,
            token=_pointer(self._tokens, ctypes.c_int32),
            embd=None,
            pos=_pointer(self._positions, ctypes.c_int32),
            n_seq_id=_pointer(self._counts, ctypes.c_int32),
            seq_id=_pointer(self._addresses, ctypes.POINTER(ctypes.c_int32)),
            logits=_pointer(self._outputs, ctypes.c_int8),
        )

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        import llama_cpp

        llama_cpp.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def remove(self, sequence: int, start: int, stop: int) -> None:
        import llama_cpp

        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, start, stop):
            raise DeviceLost("llama.cpp cannot forget a part of a sequence of this model")

    def first_position(self, sequence: int) -> int:
        """The first position that a sequence has in every layer, -1 when it is empty."""
        import llama_cpp

        return int(llama_cpp.llama_memory_seq_pos_min(self._memory, sequence))

    def decode(
        self, tokens: Int32, positions: Int32, sequences: Int32, rows: Int32
    ) -> npt.NDArray[np.float32]:
        """Run int32 `[T]` tokens; logits float32 `[len(rows), V]` of the ascending `rows`, valid
        until the next call. Raises OutOfMemory, with nothing changed, and DeviceLost."""
        import llama_cpp

        count = len(tokens)
        assert count <= len(self._tokens), f"{count} tokens in a batch of {len(self._tokens)}"
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._sequences[:count] = sequences
        self._outputs[:count] = 0
        self._outputs[rows] = 1
        self._batch.n_tokens = count
        log = start_logging()
        log.complaints.clear()
        status = llama_cpp.llama_decode(self.pointer, self._batch)
        if status == 1:
            raise OutOfMemory("llama.cpp found no KV cells for the step")
        if status != 0:
            raise DeviceLost(f"llama.cpp failed with status {status}: {log.cause()}")
        shape = (len(rows), self.model.vocab_size)
        if not len(rows):
            return np.empty(shape, np.float32)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.pointer), shape)

    def close(self) -> None:
        import llama_cpp

        if self.pointer:
            llama_cpp.llama_free(self.pointer)
            self.pointer = None


def _pointer(array: npt.NDArray[np.generic], kind: type) -> object:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
