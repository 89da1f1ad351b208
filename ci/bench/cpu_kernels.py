"""Products on the shapes of known models, each against the machine's ceiling.

    python ci/bench/cpu_kernels.py --model smollm2 --activations auto,bf16 --json kernels.json

For each number of rows: milliseconds of all layers' products and of the head (medians and best),
bytes of weights and operations a second, and the share of the ceiling that binds: bandwidth for few
rows, the products' own rate for many.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from polysilicon.backend import GroupAffine
from polysilicon_cpu.ceilings import ceiling
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.handles import MatrixHandle
from polysilicon_cpu.native import products
from polysilicon_cpu.options import Options

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
MOST_HEAD_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Outputs of the fused parts and inputs of each of a layer's products; `bits` of layers.

    biased: whether groups of 32 have a bias (Q4_1) or codes an offset (Q5_0, Q8_0).
    """

    layers: int
    products: tuple[tuple[tuple[int, ...], int], ...]
    head: tuple[int, int]
    bits: int
    biased: bool


MODELS = {
    "smollm2": Shapes(
        layers=30,
        products=(((576, 192, 192), 576), ((576,), 576), ((1536, 1536), 576), ((576,), 1536)),
        head=(49152, 576),
        bits=4,
        biased=True,
    ),
    "gemma3-270m": Shapes(
        layers=18,
        products=(((1024, 256, 256), 640), ((640,), 1024), ((2048, 2048), 640), ((640,), 2048)),
        head=(262144, 640),
        bits=5,
        biased=False,
    ),
}


def random_weight(
    rng: np.random.Generator, rows: int, columns: int, bits: int, biased: bool
) -> GroupAffine:
    groups = (rows, columns // 32)
    return GroupAffine(
        shape=(rows, columns),
        bits=bits,
        group=32,
        codes=rng.integers(0, 256, (rows, columns * bits // 8), np.uint8),
        scale=rng.uniform(0.001, 0.01, groups).astype(np.float16),
        bias=rng.uniform(-0.07, 0, groups).astype(np.float16) if biased else None,
        offset=0 if biased else 1 << (bits - 1),
    )


def place(device: CPUDevice, shapes: Shapes) -> tuple[list[MatrixHandle], MatrixHandle]:
    """The products of all layers, and the head."""
    rng = np.random.default_rng(0)

    def put(outputs: tuple[int, ...], inputs: int, bits: int, biased: bool) -> MatrixHandle:
        handle = device.put([random_weight(rng, rows, inputs, bits, biased) for rows in outputs])
        assert isinstance(handle, MatrixHandle)
        return handle

    layers = [
        put(outputs, inputs, shapes.bits, shapes.biased)
        for _ in range(shapes.layers)
        for outputs, inputs in shapes.products
    ]
    return layers, put((shapes.head[0],), shapes.head[1], 8, False)


def timing(
    device: CPUDevice, weights: list[MatrixHandle], rows: int, seconds: float
) -> dict[str, float]:
    """Milliseconds, and bytes and operations a second of the best run."""
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, max(weight.inputs for weight in weights)), np.float32)
    warm = products.chain_seconds(device, weights, x, 2)[-1]
    times = products.chain_seconds(device, weights, x, int(np.clip(seconds / warm, 5, 200)))
    best = float(times.min())
    size = sum(weight.nbytes for weight in weights)
    operations = 2 * rows * sum(weight.inputs * sum(weight.parts) for weight in weights)
    return {
        "median_ms": float(np.median(times)) * 1e3,
        "best_ms": best * 1e3,
        "bytes_per_s": size / best,
        "operations_per_s": operations / best,
    }


def report(
    name: str, figures: dict[str, float], bandwidth: Callable[[float], float], rate: float
) -> None:
    size = figures["bytes_per_s"] * figures["best_ms"] / 1e3
    print(
        f"{name:24} {figures['best_ms']:9.3f} ms ({figures['median_ms']:9.3f} median)"
        f" {figures['bytes_per_s'] / 1e9:6.1f} GB/s"
        f" ({figures['bytes_per_s'] / bandwidth(size):5.0%} of reading)"
        f" {figures['operations_per_s'] / 1e9:7.0f} Gop/s"
        f" ({figures['operations_per_s'] / rate:5.0%} of multiplying)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--activations", default="auto,bf16")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--level", default=None, help="instruction-set level")
    parser.add_argument("--rows", type=lambda text: [int(row) for row in text.split(",")],
                        default=list(ROWS))  # fmt: skip
    parser.add_argument("--seconds", type=float, default=0.5, help="for each figure")
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    arguments = parser.parse_args()
    shapes = MODELS[arguments.model]
    record: dict[str, dict[str, dict[str, float]]] = {}
    for activations in arguments.activations.split(","):
        device = CPUDevice(
            Options(threads=arguments.threads, level=arguments.level, activations=activations)
        )
        kind = {"auto": "int8"}.get(activations, activations)
        rate = max(ceiling(device.pointer, kind) for _ in range(5))
        if rate == 0:
            rate = max(ceiling(device.pointer, "f32") for _ in range(5))

        def bandwidth(size: float, device: CPUDevice = device) -> float:
            return max(ceiling(device.pointer, "read", int(size)) for _ in range(3))

        layers, head = place(device, shapes)
        print(f"{arguments.model}, {activations}, {device.level}, {device.threads} threads")
        results = record.setdefault(activations, {})
        for rows in arguments.rows:
            for name, weights in (("layers", layers), ("head", [head])):
                if name == "head" and rows > MOST_HEAD_ROWS:
                    continue
                figures = timing(device, weights, rows, arguments.seconds)
                results[f"{name}/{rows}"] = figures
                report(f"{name}, {rows} rows", figures, bandwidth, rate)
        device.close()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
