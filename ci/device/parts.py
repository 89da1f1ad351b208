"""Run the parts of the device script one after another, each in a process and with seconds of its
own, and print what came of them: `parts.py [--dry] [--seconds 460] RESULTS`.

Into the folder RESULTS go the log of each part, its cases as JSON lines and the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
WEIGHTS = ("bf16", "w4", "fp8")


def kit(dry: bool) -> list[str]:
    """The conformance kit on the card, or a little of it on the host."""
    backend = "polysilicon_cuda.host:cuda-host" if dry else "polysilicon_cuda.plugin:cuda"
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
    points = importlib.metadata.entry_points(group="pytest11")
    if not any(point.value == "polysilicon.testing.plugin" for point in points):
        command += ["-p", "polysilicon.testing.plugin"]
    # Compiling a test's kernels takes far longer than running them.
    if not dry and importlib.util.find_spec("xdist"):
        command += ["-n", str(min(14, os.cpu_count() or 1))]
    seed = str(int.from_bytes(os.urandom(4), "little"))
    command += ["--pyargs", "polysilicon.testing.conformance", "--polysilicon-backend", backend]
    return [*command, "--polysilicon-seed", seed, *(("-k", "rms_norm") if dry else ())]


def parts(results: Path, dry: bool) -> list[tuple[str, float, list[str]]]:
    """Name, most seconds, and the arguments of Python."""

    def measured(name: str, script: str, *more: str) -> list[str]:
        path = results / f"{name}.jsonl"
        return [str(HERE / script), "--out", str(path), *(("--dry",) if dry else ()), *more]

    engines = {
        weights: measured(f"engine-{weights}", "engine_speed.py", "--weights", weights)
        for weights in WEIGHTS
    }
    return [
        ("ceilings", 30, measured("ceilings", "ceilings.py")),
        ("kit", 170, kit(dry)),
        ("engine-bf16", 80, engines["bf16"]),
        ("engine-w4", 70, engines["w4"]),
        ("kernels", 60, measured("kernels", "kernel_speed.py")),
        ("engine-fp8", 60, engines["fp8"]),
    ]


def run(command: list[str], seconds: float, log: Path) -> int | None:
    """The exit status, None where it took too long and was ended."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=HERE.parent.parent,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(max(1.0, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def read_cases(results: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(results.glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def table(cases: list[dict[str, Any]]) -> list[str]:
    """A line a case, with its share of the ceiling that it could reach."""
    ceilings = {case["case"]: case for case in cases}
    copy = ceilings.get("copy", {}).get("bytes_per_s")
    product = ceilings.get("product", {}).get("flops_per_s")
    lines = []
    for case in cases:
        names = " ".join(
            f"{key}={value}" if key != "case" else str(value)
            for key, value in case.items()
            if key in ("case", "weights", "kv", "batch", "context", "prompt", "outputs", "inputs")
            or key in ("rows", "suffix")
        )
        shown = [f"{names:58}"]
        for key, form in (("ms", "{:9.3f} ms"), ("us", "{:9.1f} us")):
            if key in case:
                shown.append(form.format(case[key]))
        if "tokens_per_s" in case:
            shown.append(f"{case['tokens_per_s']:10.1f} tok/s")
        if "bytes_per_s" in case:
            share = f" ({case['bytes_per_s'] / copy:4.0%} of copy)" if copy else ""
            shown.append(f"{case['bytes_per_s'] / 1e9:8.1f} GB/s{share}")
        if "flops_per_s" in case:
            share = f" ({case['flops_per_s'] / product:4.0%} of product)" if product else ""
            shown.append(f"{case['flops_per_s'] / 1e12:7.1f} TFLOP/s{share}")
        if "core_ms_per_step" in case:
            shown.append(f"core {case['core_ms_per_step']:.3f} ms a step")
        if "error" in case:
            shown.append(f"ERROR {case['error'][:200]}")
        lines.append("  ".join(shown))
        lines += [
            f"    {kernel['share']:5.1%} {kernel['us']:9.1f} us  {kernel['kernel']}"
            for kernel in case.get("kernels", ())
        ]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    parser.add_argument("--dry", action="store_true", help="tiny shapes, on the host")
    parser.add_argument("--seconds", type=float, default=460, help="for all parts together")
    chosen = parser.parse_args()
    results = chosen.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    for path in results.glob("*.jsonl"):
        path.unlink()
    end, failed, report = time.monotonic() + chosen.seconds, [], []
    for name, seconds, command in parts(results, chosen.dry):
        log, begin = results / f"{name}.log", time.monotonic()
        status = run(command, min(seconds, end - begin), log)
        what = "cut off" if status is None else "done" if status == 0 else f"failed ({status})"
        report.append(f"{name}: {what} after {time.monotonic() - begin:.0f} s")
        print(report[-1], flush=True)
        if status != 0:
            failed.append(name)
            print(*log.read_text().splitlines()[-25:], sep="\n", flush=True)
        elif name == "kit":
            report.append(log.read_text().splitlines()[-1])
    text = "\n".join([*table(read_cases(results)), *report])
    (results / "table.txt").write_text(text + "\n")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
