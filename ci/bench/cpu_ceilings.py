"""What this machine's cores can do at most: memory bandwidth by size, and rates of products.

    python ci/bench/cpu_ceilings.py --threads 2 --json ceilings.json

Prints one table; each figure is the best of several tries, of all threads together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from polysilicon_cpu.ceilings import ceiling
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.options import Options

SIZES = {"L2": 1 << 20, "L3": 12 << 20, "DRAM": 512 << 20}
"""Bytes in all: a size that stays in each level of the memory on most machines."""


def measure(device: CPUDevice, tries: int) -> dict[str, float]:
    """Bytes and operations a second, by name."""
    wanted = [(f"{what} {place}", what, size) for what in ("read", "copy")
              for place, size in SIZES.items()]  # fmt: skip
    wanted += [(f"products {what}", what, 0) for what in ("f32", "bf16", "int8")]
    return {
        name: max(ceiling(device.pointer, what, size) for _ in range(tries))
        for name, what, size in wanted
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--level", default=None, help="instruction-set level")
    parser.add_argument("--tries", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="where to write the figures")
    arguments = parser.parse_args()
    device = CPUDevice(Options(threads=arguments.threads, level=arguments.level))
    rates = measure(device, arguments.tries)
    print(f"level {device.level}, {device.threads} threads")
    for name, rate in rates.items():
        if rate == 0:
            print(f"{name:14} no such instruction")
        elif name.startswith("products"):
            print(f"{name:14} {rate / 1e9:8.0f} Gop/s")
        else:
            print(f"{name:14} {rate / 1e9:8.1f} GB/s")
    if arguments.json is not None:
        record = {"level": device.level, "threads": device.threads, "rates": rates}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    device.close()


if __name__ == "__main__":
    main()
