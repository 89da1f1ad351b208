"""The native library: finding it, loading it, and its functions."""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint64,
    c_void_p,
)
from pathlib import Path

from polysilicon.backend import DeviceError, OutOfMemory

NAME = "libpolysilicon_cpu.so"
REASON = "build-failure.txt"
"""What the build hook leaves beside the package where it could not build the library."""

_OUT_OF_MEMORY = 2


class LibraryError(Exception):
    """The native library cannot be used; the message says why and what to do."""


class ErrorText(Structure):
    _fields_ = [("status", c_int), ("message", c_char * 508)]


class Operand(Structure):
    """Columns of a tape's buffer."""

    _fields_ = [("buffer", c_int32), ("offset", c_int32), ("width", c_int32)]


class Norm(Structure):
    """The weight [width] and epsilon of an RMS norm; no weight: there is none."""

    _fields_ = [("weight", c_void_p), ("eps", c_float)]


class FusedArguments(Structure):
    """What a product does beside: see `Fused` in native/products.h. activation: or -1."""

    _fields_ = [
        ("inner", Norm),
        ("outer", Norm),
        ("residual", Operand),
        ("hidden", Operand),
        ("activation", c_int),
    ]


class ScaleDescription(Structure):
    _fields_ = [
        ("numbers", c_void_p),
        ("type", c_int),
        ("codes", c_void_p),
        ("bits", c_int),
        ("offset", c_int),
        ("super_group", c_int),
    ]


class PartDescription(Structure):
    _fields_ = [
        ("encoding", c_int),
        ("experts", c_int),
        ("rows", c_int),
        ("columns", c_int),
        ("row_begin", c_int),
        ("row_end", c_int),
        ("column_begin", c_int),
        ("column_end", c_int),
        ("numbers", c_void_p),
        ("type", c_int),
        ("bits", c_int),
        ("group", c_int),
        ("offset", c_int),
        ("codes", c_void_p),
        ("scale", ScaleDescription),
        ("bias", ScaleDescription),
        ("table", c_void_p),
        ("block_rows", c_int),
        ("block_columns", c_int),
        ("input_order", c_void_p),
    ]


class KVPlane(Structure):
    _fields_ = [("dim", c_int), ("storage", c_int)]


class KVLayout(Structure):
    _fields_ = [
        ("group", c_int),
        ("layers", c_int),
        ("heads", c_int),
        ("page_size", c_int),
        ("window", c_int),
        ("key", KVPlane),
        ("value", KVPlane),
    ]


class AttentionParameters(Structure):
    _fields_ = [
        ("heads", c_int),
        ("scale", c_float),
        ("rope", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("q_eps", c_float),
        ("k_eps", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
        ("causal", c_bool),
        ("exact", c_bool),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
    ]


class RoutingParameters(Structure):
    _fields_ = [
        ("top_k", c_int),
        ("scoring", c_int),
        ("correction", c_void_p),
        ("groups", c_int),
        ("top_groups", c_int),
        ("renormalize", c_bool),
        ("scale", c_float),
    ]


class AdapterFactors(Structure):
    _fields_ = [
        ("target", c_int),
        ("part", c_int),
        ("rank", c_int),
        ("down", c_void_p),
        ("up", c_void_p),
    ]


class SparseView(Structure):
    _fields_ = [("start", c_void_p), ("ids", c_void_p), ("values", c_void_p)]


class SamplingView(Structure):
    _fields_ = [
        ("rows", c_int),
        ("vocabulary", c_int),
        ("logits", c_void_p),
        ("draw", c_void_p),
        ("temperature", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("min_p", c_void_p),
        ("typical_p", c_void_p),
        ("repetition", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("seed", c_void_p),
        ("choice", c_void_p),
        ("position", c_void_p),
        ("bias", SparseView),
        ("counts", SparseView),
        ("mask", c_void_p),
        ("targets", c_void_p),
        ("top_count", c_int),
        ("tokens", c_void_p),
        ("logprobs", c_void_p),
        ("target_logprobs", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
    ]


class GroupView(Structure):
    _fields_ = [("page_table", c_void_p), ("width", c_int), ("slots", c_void_p)]


class StepArguments(Structure):
    """`BatchView` and what surrounds it."""

    _fields_ = [
        ("token_count", c_int),
        ("sequence_count", c_int),
        ("row_count", c_int),
        ("group_count", c_int),
        ("tokens", c_void_p),
        ("positions", c_void_p),
        ("query_start", c_void_p),
        ("context_len", c_void_p),
        ("logit_rows", c_void_p),
        ("sequence_slot", c_void_p),
        ("adapter_slot", c_void_p),
        ("groups", c_void_p),
        ("tree_mask", c_void_p),
        ("tree_width", c_int),
        ("token_source", c_void_p),
        ("previous", c_void_p),
        ("previous_count", c_int),
        ("outputs", c_void_p),
        ("output_count", c_int),
        ("after", c_uint64),
    ]


_ERROR = POINTER(ErrorText)
_FUNCTIONS: dict[str, tuple[object, tuple[object, ...]]] = {
    "ps_levels": (None, (c_char_p, c_int)),
    "ps_level_supported": (c_bool, (c_char_p,)),
    "ps_self_test": (c_int, (c_char_p,)),
    "ps_device_open": (c_void_p, (c_char_p, c_int, c_void_p, c_bool, _ERROR, c_uint64)),
    "ps_device_close": (None, (c_void_p,)),
    "ps_device_workspace": (c_size_t, (c_void_p,)),
    "ps_ceiling": (c_double, (c_void_p, c_int, c_size_t, _ERROR)),
    "ps_done": (c_bool, (c_void_p, c_uint64)),
    "ps_wait": (c_bool, (c_void_p, c_uint64, _ERROR)),
    "ps_weight_create": (
        c_void_p,
        (c_void_p, POINTER(PartDescription), c_int, c_int, _ERROR),
    ),
    "ps_weight_destroy": (None, (c_void_p,)),
    "ps_weight_bytes": (c_size_t, (c_void_p,)),
    "ps_weight_rows": (c_bool, (c_void_p, c_void_p, c_void_p, c_int, c_void_p, _ERROR)),
    "ps_adapters_create": (
        c_void_p,
        (c_int, c_void_p, c_void_p, c_void_p, c_int, c_int, _ERROR),
    ),
    "ps_adapters_destroy": (None, (c_void_p,)),
    "ps_adapters_bytes": (c_size_t, (c_void_p,)),
    "ps_adapters_write": (
        c_uint64,
        (c_void_p, c_void_p, c_int, POINTER(AdapterFactors), c_int),
    ),
    "ps_kv_create": (c_void_p, (c_void_p, POINTER(KVLayout), c_int, _ERROR)),
    "ps_kv_destroy": (None, (c_void_p,)),
    "ps_kv_bytes": (c_size_t, (c_void_p,)),
    "ps_kv_copy": (c_uint64, (c_void_p, c_void_p, c_void_p, c_void_p, c_int)),
    "ps_kv_read": (
        c_uint64,
        (c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_size_t, c_size_t, c_size_t),
    ),
    "ps_kv_write": (
        c_uint64,
        (c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_size_t, c_size_t, c_size_t),
    ),
    "ps_tape_create": (c_void_p, (c_bool,)),
    "ps_tape_destroy": (None, (c_void_p,)),
    "ps_tape_bytes": (c_size_t, (c_void_p,)),
    "ps_tape_profile": (None, (c_void_p, c_char_p, c_int)),
    "ps_tape_buffer": (c_int, (c_void_p, c_int, c_int, c_int, c_int)),
    "ps_tape_rope_table": (c_void_p, (c_void_p, POINTER(c_double), c_int, c_float, c_bool)),
    "ps_tape_embed": (None, (c_void_p, c_void_p, Operand)),
    "ps_tape_linear": (
        None,
        (c_void_p, Operand, POINTER(FusedArguments), c_void_p, c_void_p, Operand),
    ),
    "ps_tape_lora": (None, (c_void_p, Operand, c_void_p, c_int, Operand)),
    "ps_tape_rms_norm": (None, (c_void_p, Operand, Operand, Norm, Operand, Operand)),
    "ps_tape_layer_norm": (
        None,
        (c_void_p, Operand, Operand, c_void_p, c_void_p, c_float, Operand, Operand),
    ),
    "ps_tape_add": (None, (c_void_p, Operand, Operand, Operand)),
    "ps_tape_scale": (None, (c_void_p, Operand, c_float, Operand)),
    "ps_tape_softcap": (None, (c_void_p, Operand, c_float, Operand)),
    "ps_tape_rope": (None, (c_void_p, Operand, c_void_p, c_int, Operand)),
    "ps_tape_gated_act": (None, (c_void_p, Operand, Operand, c_int, Operand)),
    "ps_tape_copy": (None, (c_void_p, Operand, Operand)),
    "ps_tape_select": (None, (c_void_p, Operand, Operand)),
    "ps_tape_check_batch": (None, (c_void_p, c_void_p)),
    "ps_tape_attention": (
        None,
        (
            c_void_p,
            Operand,
            Operand,
            Operand,
            c_void_p,
            c_int,
            POINTER(AttentionParameters),
            Operand,
        ),
    ),
    "ps_tape_moe": (
        None,
        (
            c_void_p,
            Operand,
            Operand,
            c_void_p,
            c_void_p,
            POINTER(RoutingParameters),
            c_int,
            c_void_p,
            c_void_p,
            Operand,
        ),
    ),
    "ps_sample": (c_uint64, (c_void_p, POINTER(SamplingView), c_uint64)),
    "ps_submit_step": (c_uint64, (c_void_p, c_void_p, POINTER(StepArguments))),
}


def path() -> Path:
    """Where the library is: beside this file, or where POLYSILICON_CPU_LIBRARY says (another build,
    such as one with sanitizers)."""
    named = os.environ.get("POLYSILICON_CPU_LIBRARY")
    return Path(named) if named else Path(__file__).with_name(NAME)


@functools.cache
def load() -> ctypes.CDLL:
    """The library with its functions declared. Raises LibraryError."""
    place = path()
    if not place.is_file():
        raise LibraryError(_missing(place))
    try:
        library = ctypes.CDLL(str(place))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"the native library cannot be loaded ({error}): build it again for this system (in "
            "a clone: pip install --force-reinstall --no-cache-dir .)"
        ) from error
    return library


def raise_error(error: ErrorText) -> None:
    """Raise what a native call reported."""
    message = error.message.decode(errors="replace")
    raise OutOfMemory(message) if error.status == _OUT_OF_MEMORY else DeviceError(message)


def _missing(place: Path) -> str:
    try:
        reason = place.with_name(REASON).read_text().strip()
    except OSError:
        reason = "this installation was made without it"
    return (
        f"the native library was not built: {reason}. Install a C++ compiler (apt-get install g++, "
        "or your system's like) and install polysilicon again (in a clone: pip install "
        "--force-reinstall --no-cache-dir .)"
    )
