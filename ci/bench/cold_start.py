"""From the start of a process to its first token: `polysilicon run` against llama-cpp-python.

    python ci/bench/cold_start.py MODEL.gguf --json out.json

Every run is a new process, imports included, that continues one prompt by one token; the file is in
the page cache. Needs llama-cpp-python beside polysilicon, and a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from polysilicon_cpu import processor

PROMPT = "The capital of France is"
OURS = "from polysilicon.cli import main; main()"
THEIRS = """
import sys
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=512, verbose=False)
print(model(sys.argv[2], max_tokens=1)["choices"][0]["text"], flush=True)
"""


def seconds(command: list[str]) -> float:
    """Until the command's first output; it must then end well."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.read(1)
        passed = time.perf_counter() - began
        _, complaints = process.communicate()
    if process.returncode or not first:
        sys.exit(f"{command[:3]} failed: {complaints.decode()}")
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--pairs", type=int, default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = str(options.model)
    sides = {
        "polysilicon": [sys.executable, "-c", OURS, "run", "--backend", options.backend,
                        "--max-tokens", "1", model, PROMPT],
        "llama-cpp-python": [sys.executable, "-c", THEIRS, model, PROMPT],
    }  # fmt: skip
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed: polysilicon alone")
        del sides["llama-cpp-python"]
    runs: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(options.pairs + 1):
        for name, command in sides.items():
            passed = seconds(command)
            if pair:  # the first one warms the page cache
                runs[name].append(passed)
    print(f"{options.model.name}, {processor.name()}, seconds to the first token, medians of pairs")
    for name, times in runs.items():
        print(f"{name:18} {statistics.median(times):6.2f} ({min(times):.2f} to {max(times):.2f})")
    if len(runs) == 2:
        ratio = statistics.median(b / a for a, b in zip(*runs.values(), strict=True))
        print(f"llama-cpp-python takes {ratio:.2f} times as long")
    if options.json:
        report = {"model": options.model.name, "backend": options.backend,
                  "machine": processor.name(), "seconds": runs}  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
