"""From an open checkpoint to a quantised one beside it."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from polysilicon.errors import ConfigError, PolysiliconError
from polysilicon.models.architecture import Architecture
from polysilicon.progress import Progress, no_progress
from polysilicon.quantization.calibration import calibration_sequences, run
from polysilicon.quantization.directory import DirectoryOutput, choose_grids
from polysilicon.quantization.gguf_output import GGUF_FORMATS, GGUFOutput
from polysilicon.quantization.layouts import LAYOUTS
from polysilicon.quantization.methods import AWQ, GPTQ
from polysilicon.quantization.output import Output
from polysilicon.quantization.source import ModelSource, Unit
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.checkpoint import Checkpoint
from polysilicon.weights.encodings import Float32, GroupAffine, Weight
from polysilicon.weights.gguf import GGUFFile
from polysilicon.weights.stacks import stack_weights

METHODS = ("rtn", "gptq", "awq")
TARGETS = (*LAYOUTS, *GGUF_FORMATS)


def quantize(
    checkpoint: Checkpoint,
    out: Path,
    *,
    to: str,
    method: str = "rtn",
    bits: int | None = None,
    group: int | None = None,
    calibration: str | None = None,
    progress: Progress = no_progress,
    added: Sequence[Architecture] = (),
) -> list[str]:
    """Write a checkpoint's model to `out`, quantised; returns notes for the user.

    to: one of `TARGETS`; GGUF's are files, the others directories. method: one of `METHODS`.
    bits, group: of the targets that leave a choice; None for the usual ones. calibration: the text
    that `gptq` and `awq` look at.

    `out` appears when it is complete, and stays away where anything fails. Raises ConfigError for
    settings that do not go together, ModelError for a model that cannot be written so, and
    PolysiliconError where the disk is full or cannot be written.
    """
    _check_settings(out, to, method, bits, group, calibration)
    gguf = to in GGUF_FORMATS
    stacks = not gguf and LAYOUTS[to].stacks
    source = ModelSource(checkpoint, gguf=gguf, stacks=stacks, added=added)
    grids = None if gguf else choose_grids(source, to, bits, group)
    with _beside(out) as folder:
        output: Output
        if grids is None:
            output = GGUFOutput(folder / "model.gguf", source, to)
        else:
            output = DirectoryOutput(folder, source, to, grids)
        with progress(f"quantising {checkpoint.path.name}") as advance:
            done, total = 0, _total(source, calibrated=method != "rtn")

            def finished(elements: int) -> None:
                nonlocal done
                done += 2 * elements
                advance(done, total)

            notes = _write(source, output, method, calibration, finished)
            output.close()
            advance(total, total)
        if gguf:
            (folder / "model.gguf").rename(out)
        else:
            folder.rename(out)
    return notes + output.notes + _left_out(source)


def _check_settings(
    out: Path, to: str, method: str, bits: int | None, group: int | None, calibration: str | None
) -> None:
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out} exists already: name another place, or remove it first")
    if not out.parent.is_dir():
        raise ConfigError(f"{out.parent} is not a directory: create it first")
    if to in GGUF_FORMATS and (bits is not None or group is not None):
        raise ConfigError(f"--to {to} settles bits and groups: leave --bits and --group out")
    if method == "rtn" and calibration is not None:
        raise ConfigError("--method rtn looks at no text: leave --calibrate out, or take gptq")
    if method != "rtn" and calibration is None:
        raise ConfigError(f"--method {method} needs a text like those to come: --calibrate FILE")


def _total(source: ModelSource, *, calibrated: bool) -> int:
    """Bytes, counted in 16 bits, of all units, and again of those that calibration visits."""
    units = source.units.values()
    visited = (unit for unit in units if calibrated and unit.linear and not unit.table)
    return sum(2 * math.prod(unit.shape) for group in (units, visited) for unit in group)


def _write(
    source: ModelSource,
    output: Output,
    method: str,
    calibration: str | None,
    finished: Callable[[int], None],
) -> list[str]:
    """Quantise and write every unit in order; returns notes."""
    gptq, awq = None, None
    notes: list[str] = []
    if calibration is not None:
        sequences = calibration_sequences(
            _tokenizer(source.checkpoint), calibration, source.config.max_length
        )
        if method == "gptq":
            gptq = GPTQ(source, output.fit, finished)
            run(source, sequences, gptq)
        else:
            awq = AWQ(source, output.fit, finished)
            run(source, sequences, awq)
    for unit in source.units.values():
        fit = output.fit(unit)
        if fit is None:
            output.dense(unit, _scaled(source, unit, awq))
        else:
            weights: list[Weight] = []
            for matrix in range(unit.matrices):
                at = unit.name, matrix
                if gptq is not None and at in gptq.weights:
                    weights.append(gptq.weights.pop(at))
                    continue
                values = source.values(unit, matrix)
                if awq is not None:
                    values = awq.scaling.applied(unit, values, matrix)
                grid = fit(values, None if awq is None else awq.importance.get(at))
                weights.append(grid.weight(grid.nearest(values)))
            weight = stack_weights(weights) if len(unit.shape) == 3 else weights[0]
            assert isinstance(weight, GroupAffine)
            output.quantized(unit, weight)
        finished(math.prod(unit.shape))
    if awq is not None and not awq.scaling.known:
        notes.append(
            f"inputs were not scaled: what feeds the linears of {source.family.name} is not known. "
            "--method gptq has no need of it."
        )
    return notes + [note for method in (gptq, awq) if method for note in method.scarce.notes()]


def _scaled(source: ModelSource, unit: Unit, awq: AWQ | None) -> Float32:
    """The values of a unit that stays dense."""
    if awq is None:
        return source.values(unit)
    if len(unit.shape) < 3:
        return awq.scaling.applied(unit, source.values(unit))
    return np.stack(
        [
            awq.scaling.applied(unit, source.values(unit, matrix), matrix)
            for matrix in range(unit.matrices)
        ]
    )


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if isinstance(checkpoint, GGUFFile):
        return Tokenizer.from_gguf(checkpoint.metadata)
    return Tokenizer.from_directory(checkpoint.path)


def _left_out(source: ModelSource) -> list[str]:
    unknown = [name for name in source.unknown if "rope_f" not in name and "rotary" not in name]
    if not unknown:
        return []
    return [
        f"{len(unknown)} tensors that the model has no use for are left out ({unknown[0]}"
        f"{', ...' if len(unknown) > 1 else ''})."
    ]


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """An empty directory next to `out`, for what is not complete yet; gone at the end, unless it
    became `out`."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PolysiliconError(
                f"the disk of {out.parent} is full: make room, or name another place"
            ) from error
        raise PolysiliconError(
            f"{error.filename or out} cannot be written: {error.strerror}. "
            "Check its permissions, or name another place."
        ) from error
