"""`polysilicon quantize`: write a quantised checkpoint that other tools read too."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from polysilicon.commands.options import configured
from polysilicon.config import Config
from polysilicon.errors import ConfigError

_MOST_TEXT_BYTES = 64 << 20


class Target(StrEnum):
    """The formats that are written."""

    COMPRESSED_TENSORS = "compressed-tensors"
    GPTQ = "gptq"
    AWQ = "awq"
    MLX = "mlx"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"
    Q8_0 = "q8_0"
    Q4_K = "q4_k"
    Q5_K = "q5_k"
    Q6_K = "q6_k"
    Q4_K_M = "q4_k_m"
    Q5_K_M = "q5_k_m"


class Method(StrEnum):
    """How values become codes."""

    RTN = "rtn"
    GPTQ = "gptq"
    AWQ = "awq"


@configured({"quantization", "block_plugins"})
def quantize(
    model: Annotated[
        str, typer.Argument(help="Catalogue name, path or hf:owner/repo[:file].", metavar="MODEL")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="Directory to make, or .gguf file where --to names a GGUF type.", metavar="OUT"
        ),
    ],
    config: Config,
    to: Annotated[
        Target, typer.Option(help="Format: of a directory of safetensors, or a GGUF type.")
    ],
    method: Annotated[
        Method,
        typer.Option(
            help="rtn rounds to nearest; gptq lets later columns make up for rounding errors; awq "
            "gives large inputs finer steps. Both need --calibrate."
        ),
    ] = Method.RTN,
    bits: Annotated[int | None, typer.Option(help="Bits of a weight. Default: 4.")] = None,
    group: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale. Default: the format's usual one that fits."),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="Text like those to come; its first 16,384 tokens are used."),
    ] = None,
) -> None:
    """Quantise a model into a checkpoint that other tools read too."""
    from polysilicon import progress
    from polysilicon.catalogue import resolve_model
    from polysilicon.plugins import load_plugins
    from polysilicon.quantization.quantize import quantize as write
    from polysilicon.weights.checkpoint import open_checkpoint

    _check_name(out, to)
    text = None if calibrate is None else _text(calibrate)
    plugins = load_plugins(config.block_plugins)
    path = resolve_model(model, progress=progress.bar)
    with (
        _ended_cleanly(),
        open_checkpoint(
            path, quantization=config.quantization, added=plugins.checkpoint_formats
        ) as checkpoint,
    ):
        notes = write(
            checkpoint,
            out,
            to=to.value,
            method=method.value,
            bits=bits,
            group=group,
            calibration=text,
            progress=progress.bar,
            added=plugins.architectures,
        )
    for note in notes:
        print(f"polysilicon: {note}", file=sys.stderr)
    print(out)


def _check_name(out: Path, to: Target) -> None:
    """Names say what they are of."""
    is_file = to not in (Target.COMPRESSED_TENSORS, Target.GPTQ, Target.AWQ, Target.MLX)
    if is_file and out.suffix != ".gguf":
        raise ConfigError(f"--to {to.value} makes a GGUF file: give OUT the ending .gguf")
    if not is_file and out.suffix == ".gguf":
        raise ConfigError(f"--to {to.value} makes a directory: give OUT another ending than .gguf")


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """SIGTERM and SIGHUP, which end a process at once, take with them what is half-written."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    taken = [
        number
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_TEXT_BYTES)
    except OSError as error:
        raise ConfigError(f"--calibrate {path} cannot be read: {error.strerror}") from None
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        # A larger file may be cut within a character.
        if len(content) == _MOST_TEXT_BYTES and error.reason == "unexpected end of data":
            return content[: error.start].decode()
        raise ConfigError(
            f"--calibrate {path} is not UTF-8 at byte {error.start}: convert it, as with "
            "iconv -t utf-8"
        ) from None
