"""Many small random products of the CPU backend against float64.

    python ci/cpu_random_products.py --products 1000000

Every case draws encodings, shapes, row counts, a bias and the rounding of inputs, at every
instruction-set level that runs here, and holds each output to a bound that rounding cannot exceed.
Ends with an error that names the case's seed at the first product outside of it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import numpy.typing as npt

from polysilicon.testing import encoded
from polysilicon.testing.encoded import Encoded
from polysilicon_cpu import levels
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.handles import MatrixHandle
from polysilicon_cpu.native import products
from polysilicon_cpu.options import Options

ACTIVATIONS = ("f32", "bf16", "int8", "auto")
GROUPS = (16, 32, 48, 64, 128, 256)
ROWS_OF_A_WEIGHT = 4
LARGEST_ROWS = 130


class WrongResult(Exception):
    """A product outside of its bound; the message names the case."""


def roundings_of(level: str) -> tuple[str, ...]:
    """Roundings of inputs that a level has kernels for; others give what float32 gives."""
    if level == "portable":
        return ("f32",)
    return ACTIVATIONS if level.startswith(("amx", "avx512")) else ("f32", "int8", "auto")


def devices(threads: int) -> dict[tuple[str, str], CPUDevice]:
    """A device for every level that runs here and every rounding of inputs that it has.

    They are deterministic, but for AMX's: it has kernels for many rows that are not.
    """
    usable = [level for level in levels.built() if levels.failure(level) is None]
    return {
        (level, activations): CPUDevice(
            Options(
                level=level,
                threads=threads,
                activations=activations,
                deterministic=level != "amx",
            )
        )
        for level in usable
        for activations in roundings_of(level)
    }


def random_part(rng: np.random.Generator, rows: int, columns: int) -> Encoded:
    """A part of any encoding that fits the columns."""
    kind = rng.choice(["affine", "affine", "affine", "float", "dense", "block"])
    groups = [group for group in (*GROUPS, columns) if columns % group == 0]
    group = int(rng.choice(groups))
    shape = (rows, columns)
    if kind == "affine":
        variant = str(rng.choice(encoded.AFFINE_VARIANTS))
        return encoded.affine(rng, shape, int(rng.integers(2, 9)), group, variant)
    if kind == "float":
        variant = str(rng.choice(encoded.FLOAT_VARIANTS))
        return encoded.group_float(
            rng, shape, str(rng.choice(encoded.FLOAT_FORMATS)), group, variant
        )
    if kind == "block":
        block = (int(rng.integers(1, 40)), int(rng.choice([16, 32, 40, 64])))
        return encoded.group_float(rng, shape, "f8_e4m3", columns, block=block)
    return encoded.of_kind(f"dense:{rng.choice(['f32', 'f16', 'bf16'])}")(rng, shape)


def random_columns(rng: np.random.Generator) -> int:
    if rng.random() < 0.3:
        return int(rng.integers(1, 300))
    return int(rng.choice(GROUPS) * rng.integers(1, 5))


def largest_error(
    x: npt.NDArray[np.float64], values: npt.NDArray[np.float64], activations: str
) -> npt.NDArray[np.float64]:
    """What rounding may add up to, for x `[rows, K]` and W `[N, K]`: `[rows, N]`.

    Inputs in bf16 are off by 2^-8 of themselves, as are weights that are not whole numbers of a
    scale; in int8, by half of the row's step, whose 127th multiple is the largest input, or 3.2
    (`auto`) or 6.4 times the row's root mean square where that is less, as long as 16 bits hold the
    largest. Sums are in float32.
    """
    sizes, weights = np.abs(x), np.abs(values)
    # Scale times code and bias may nearly cancel, in every element of a row that has few.
    sums = sizes.sum(axis=1)[:, None] * np.maximum(weights.max(axis=1), weights.max() / 10)
    if activations == "f32":
        return 1e-5 * sums + 1e-30
    rounding = 2.0**-7 * 1.01 * (sizes @ weights.T)
    if activations in ("int8", "auto"):
        largest = sizes.max(axis=1)
        limit = (3.21 if activations == "auto" else 6.41) * np.sqrt(np.mean(sizes**2, axis=1))
        largest = np.maximum(np.minimum(largest, limit), largest / 256)
        rounding += largest[:, None] / 254 * 1.02 * weights.sum(axis=1)
    return rounding + 1e-4 * sums


def check_weight(
    rng: np.random.Generator, device: CPUDevice, activations: str, row_counts: int
) -> None:
    """One weight of one to three parts, multiplied with several numbers of rows."""
    columns = random_columns(rng)
    parts = [
        random_part(rng, int(rng.integers(1, 70)), columns)
        for _ in range(rng.choice([1, 1, 1, 2, 3]))
    ]
    handle = device.put([part.weight for part in parts])
    assert isinstance(handle, MatrixHandle)
    values = np.concatenate([part.values for part in parts])
    exact = np.concatenate([part.weight.dequantize() for part in parts])
    if not np.array_equal(handle.values(), exact):
        raise WrongResult("rows read back differ from the weight's values")
    bias = rng.standard_normal(len(values), np.float32) if rng.random() < 0.3 else None
    x = rng.standard_normal((LARGEST_ROWS, columns), np.float32)
    x *= np.exp(rng.standard_normal(columns) * rng.choice([0, 1])).astype(np.float32)
    first = None
    for _ in range(row_counts):
        rows = int(rng.integers(1, 18)) if rng.random() < 0.8 else int(rng.integers(18, 131))
        actual = products.linear(device, handle, x[:rows], bias)
        wide = x[:rows].astype(np.float64)
        expected = wide @ values.T + (0 if bias is None else bias)
        allowed = largest_error(wide, values, activations) + 1e-6 * np.abs(expected)
        if not np.all(np.abs(actual - expected) <= allowed):
            encodings = "+".join(part.weight.encoding for part in parts)
            raise WrongResult(f"{encodings} of {values.shape} with {rows} rows is out of bounds")
        first = actual[0] if first is None else first
        if device.options.deterministic and not np.array_equal(actual[0], first):
            raise WrongResult(f"the first row differs among {rows} rows")


def run(count: int, seed: int, seconds: float) -> int:
    """Products checked, of `count` or as many as the time allowed."""
    open_devices = {threads: devices(threads) for threads in (1, 2)}
    begin, done = time.monotonic(), 0
    try:
        while done < count and time.monotonic() - begin < seconds:
            rng = np.random.default_rng([seed, done])
            chosen = open_devices[2 if rng.random() < 0.05 else 1]
            names = list(chosen)
            level, activations = names[rng.integers(len(names))]
            try:
                check_weight(rng, chosen[level, activations], activations, ROWS_OF_A_WEIGHT)
            except WrongResult as error:
                raise WrongResult(
                    f"seed [{seed}, {done}], {level}, {activations}: {error}"
                ) from None
            done += ROWS_OF_A_WEIGHT
    finally:
        for chosen in open_devices.values():
            for device in chosen.values():
                device.close()
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--products", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % (1 << 32))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long")
    arguments = parser.parse_args()
    done = run(arguments.products, arguments.seed, arguments.seconds)
    print(f"{done:,} random products within their bounds (seed {arguments.seed})")


if __name__ == "__main__":
    main()
