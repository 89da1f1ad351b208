"""polysilicon against llama.cpp on the same file, with the same number of threads, in pairs.

    python ci/bench/cpu_vs_llamacpp.py MODEL.gguf --json out.json

Needs llama-cpp-python beside polysilicon, and a machine with nothing else to do, for about a
quarter of an hour. llama.cpp is at its best when it is compiled for the machine by clang; what
gcc 12 makes of its AMX kernels crashes:

    CC=clang CXX=clang++ CMAKE_ARGS=-DGGML_NATIVE=ON \\
        pip install --no-binary llama-cpp-python llama-cpp-python

The compiler and llama.cpp's own account of the build are printed. Flash attention is tried on and
off in every case, and the better one counts. A cell is 64 tokens decoded behind 512 (`--output`,
`--context`) unless it is a prefill; `shared` is decoding behind one prefix that all streams share,
which llama.cpp keeps once in a unified KV cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from sides import Case, Side, compare, numbers

from polysilicon_cpu import processor

MODES = ("on", "off")
"""Of flash attention."""


def cases(options: argparse.Namespace, longest: int) -> list[Case]:
    """The table's rows; longest: the context that ours has."""
    prefills = sorted({min(tokens, longest - 2) for tokens in options.prefill})
    found = [Case(work="prefill", tokens=tokens) for tokens in prefills]
    for work, counts in (("decode", options.streams), ("shared", options.shared)):
        found += [
            Case(work=work, tokens=options.context, streams=streams, output=options.output)
            for streams in counts
        ]
    return found


def sharing(rows: list[dict[str, Any]]) -> list[str]:
    """What a shared prefix gains over streams that share nothing, a line a number of streams."""
    alone = {row["streams"]: row for row in rows if row["work"] == "decode"}
    lines = []
    for row in rows:
        if row["work"] == "shared" and row["streams"] in alone:
            ours, theirs = (row[side] / alone[row["streams"]][side] for side in ("ours", "theirs"))
            lines.append(
                f"sharing the prefix among {row['streams']} streams: {ours:.2f} times "
                f"polysilicon's figure without, {theirs:.2f} times llama.cpp's"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--backend-option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--prefill", type=numbers, default=[512, 8192], metavar="512,8192")
    parser.add_argument("--streams", type=numbers, default=[1, 8, 32, 64], metavar="1,8,32,64")
    parser.add_argument("--shared", type=numbers, default=[64], metavar="64",
                        help="numbers of streams behind one prefix")  # fmt: skip
    parser.add_argument("--context", type=int, default=512, help="tokens before decoding")
    parser.add_argument("--output", type=int, default=64, help="tokens decoded a stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = dict(pair.split("=", 1) for pair in options.backend_option)
    if options.backend == "cpu":
        chosen.setdefault("threads", str(options.threads))
    most = max([*options.streams, *options.shared], default=1)
    ours = Side(sys.executable, "side_ours.py", str(options.model), options.backend, chosen, most)
    theirs = Side(sys.executable, "side_llamacpp.py", str(options.model), options.threads)
    build = theirs("build")
    print(f"{options.model.name}, {processor.name()}, {options.threads} threads, tokens/s, medians")
    print(f"llama-cpp-python {build['llama_cpp_python']} by {build['compiler']}: {build['system']}")
    if not build["extra_buffers"]:
        print("llama.cpp crashes with its extra buffer types and runs without them")
    rows = compare(
        cases(options, int(ours("context"))),
        ours.rate(),
        {mode: theirs.rate(mode) for mode in MODES},
        "llama.cpp",
        options.repeats,
    )
    print("\n".join(sharing(rows)))
    if options.json:
        report = {
            "model": options.model.name,
            "backend": options.backend,
            "backend_options": chosen,
            "threads": options.threads,
            "machine": processor.name(),
            "llama_cpp": build,
            "cases": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    ours.close()
    theirs.close()


if __name__ == "__main__":
    main()
