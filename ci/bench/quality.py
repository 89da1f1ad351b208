"""What quantised checkpoints cost in quality: the README's table of perplexity and KL divergence.

    python ci/bench/quality.py --reference MODEL --text FILE "GGUF Q4_0=q4_0.gguf" "AWQ=awq/" ...

Each checkpoint is compared with the reference, whose weights are dequantised exactly where it is
quantised itself, on the same backend in float32: what differs is what its weights lost. A name may
stand before the path. Prints the table in Markdown; `--json` writes all figures.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysilicon.config import Config
from polysilicon.engine.loading import Loaded, load
from polysilicon.evals.text import compare_text, read_text, text_figures, windows_of
from polysilicon.evals.windows import Cut
from polysilicon.weights.checkpoint import open_checkpoint

COLUMNS = (
    "checkpoint", "MiB", "bits per weight", "perplexity", "over the reference's",
    "KL divergence", "its 99 %", "same likeliest token",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+", type=named, metavar="[NAME=]CHECKPOINT")
    parser.add_argument("--reference", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--convention", choices=["huggingface", "llamacpp"], default="huggingface")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--activations", default="f32")
    parser.add_argument("--kv-dtype", default="f32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    config = Config(
        backend=options.backend,
        activations=options.activations,
        kv_dtype=options.kv_dtype,
        max_sequences=1,
    )
    cut = Cut(convention=options.convention, context=options.context)
    text = read_text(options.text)
    parameters = count_parameters(options.reference)
    rows: list[dict[str, Any]] = []
    for name, path in options.checkpoints:
        size = file_bytes(path)
        row = {
            "name": name,
            "bytes": size,
            "bits_per_weight": 8 * size / parameters,
            **compared(path, options.reference, config, text, cut),
        }
        if not rows:
            print_row(COLUMNS)
            print_row(["---", *["---:"] * (len(COLUMNS) - 1)])
            print_reference(row, options.reference, parameters)
        print_checkpoint(row)
        rows.append(row)
    if options.json:
        report = {
            "reference": options.reference.name,
            "text": options.text.name,
            "cut": cut.describe(""),
            "config": config.model_dump(include=config.model_fields_set),
            "checkpoints": rows,
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def named(text: str) -> tuple[str, Path]:
    """`NAME=PATH`, or a path, which is called by its last part."""
    name, equals, path = text.rpartition("=")
    return (name, Path(path)) if equals else (Path(text).name, Path(text))


def compared(
    path: Path, reference: Path, config: Config, text: str, cut: Cut
) -> dict[str, float | None]:
    """The figures of a checkpoint against the reference."""
    opened: list[Loaded] = []
    try:
        for model in (path, reference):
            opened.append(load(config, model))
        ours, theirs = opened
        windows = windows_of(ours, text, cut)
        if windows != windows_of(theirs, text, cut):
            raise SystemExit(f"{path} and {reference} cut the text into different tokens")
        return text_figures(compare_text(ours, theirs, windows, lambda: None))
    finally:
        for loaded in opened:
            loaded.client.close()
            loaded.checkpoint.close()


def count_parameters(path: Path) -> int:
    with open_checkpoint(path) as checkpoint:
        return sum(math.prod(info.shape) for info in checkpoint.tensors.values())


def file_bytes(path: Path) -> int:
    """Of a checkpoint's weights."""
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files)


def print_row(cells: Sequence[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def print_reference(row: dict[str, Any], path: Path, parameters: int) -> None:
    size = file_bytes(path)
    bits = 8 * size / parameters
    perplexity = f"{row['reference_perplexity']:.3f}"
    cells = [f"{size / 2**20:.1f}", f"{bits:.2f}", perplexity, "1", "0", "0", "100 %"]
    print_row([f"{path.name}, the reference", *cells])


def print_checkpoint(row: dict[str, Any]) -> None:
    error = row["perplexity_ratio_stderr"]
    ratio = f"{row['perplexity_ratio']:.4f}" + (f" ± {error:.4f}" if error is not None else "")
    print_row(
        [
            row["name"],
            f"{row['bytes'] / 2**20:.1f}",
            f"{row['bits_per_weight']:.2f}",
            f"{row['perplexity']:.3f}",
            ratio,
            f"{row['mean_kl']:.5f}",
            f"{row['kl_p99']:.4f}",
            f"{100 * row['agreement']:.2f} %",
        ]
    )


if __name__ == "__main__":
    main()
