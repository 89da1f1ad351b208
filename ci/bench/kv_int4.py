"""What KV of 4 bits would cost in quality, beside that of the KV dtypes there are.

    python ci/bench/kv_int4.py --text tests/fixtures/perplexity.txt MODEL.gguf [--only WORD]

A text runs through the reference device as one sequence, `CHUNK` tokens a step, once for every rule
of `RULES` side by side; each is compared with KV in float32. The rules of 4 bits are not storage
that a device has: keys and values are rounded as they would be stored, and kept in float32. Prints
the table in Markdown; `--json` writes all figures.

Symmetric: codes -7 to 7 under one float32 scale, `max |y| / 7`. Asymmetric: codes 0 to 15 between
the least and the largest of a group, its scale and least in float16. Gaussian: the 16 levels that
are best for a normal distribution (Lloyd and Max), times the root of the vector's mean square, in
float16. Turned: by the Walsh-Hadamard transform of `KV_DTYPES`, before rounding and back. Fitted:
of the plain scale and 16 smaller ones, from 0.7 times it on, the one with the least square error in
each group.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polysilicon.backend import KV_DTYPES, KVScales, KVSpec
from polysilicon.engine.loading import load_tokenizer
from polysilicon.evals.divergence import Comparison, compare, joined
from polysilicon.models.loading import load_model
from polysilicon.models.model import Model
from polysilicon.reference.device import ReferenceDevice
from polysilicon.reference.pools import ReferenceKVPool, quantize, turn
from polysilicon.testing.batches import Chunk, make_batch
from polysilicon.weights.checkpoint import open_checkpoint

Float32 = npt.NDArray[np.float32]
Rounding = Callable[[Float32], Float32]

CHUNK = 64
PAGE_SIZE = 64
GAUSSIAN = (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326)
"""Of one side; S. P. Lloyd, IEEE Trans. Inf. Theory 28 (1982), and J. Max, IRE 6 (1960)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """How keys and values `[T, heads, dim]` are rounded. bits: of an element of a head of 64.
    first: tokens at the start of the sequence that stay as they are. recent: so do those of the
    newest step, until the next one."""

    name: str
    bits: float
    keys: Rounding
    values: Rounding
    first: int = 0
    recent: bool = False


def stored_as(dtype: str) -> Rounding:
    def rounding(x: Float32) -> Float32:
        codes, scales = quantize(x, dtype)
        values: Float32 = codes.astype(np.float32) * scales
        return turn(values) if dtype == "int8" else values

    return rounding


def symmetric(group: int | None, *, turned: bool, fitted: bool = False) -> Rounding:
    def by_group(x: Float32) -> Float32:
        scale = np.abs(x).max(axis=-1, keepdims=True) / 7
        return best(x, scale, fitted, lambda x, s: np.clip(np.rint(x / s), -7, 7) * s)

    return transformed(functools.partial(in_groups, by_group, group), turned)


def asymmetric(group: int | None, *, turned: bool, fitted: bool = False) -> Rounding:
    def by_group(x: Float32) -> Float32:
        low, high = (f(x, axis=-1, keepdims=True) for f in (np.min, np.max))
        middle = (low + high) / 2

        def rounded(x: Float32, scale: Float32) -> Float32:
            scale = half(scale)
            least = half(middle - 7.5 * scale)
            codes = np.clip(np.rint((x - least) / scale), 0, 15)
            return np.asarray(codes * scale + least, np.float32)

        return best(x, (high - low) / 15, fitted, rounded)

    return transformed(functools.partial(in_groups, by_group, group), turned)


def gaussian(x: Float32) -> Float32:
    levels = np.array([-level for level in reversed(GAUSSIAN)] + list(GAUSSIAN), np.float32)
    turned = turn(x)
    scale = half(np.sqrt(np.square(turned).mean(axis=-1, keepdims=True)) + np.float32(1e-20))
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, turned / scale)
    return turn(levels[codes] * scale)


def as_it_is(x: Float32) -> Float32:
    return x


def half(x: Float32) -> Float32:
    """Rounded to float16, and never 0."""
    rounded = x.astype(np.float16).astype(np.float32)
    return np.where(rounded == 0, np.float32(2**-24), rounded)


def in_groups(rounding: Rounding, group: int | None, x: Float32) -> Float32:
    size = group or x.shape[-1]
    return rounding(x.reshape(*x.shape[:-1], -1, size)).reshape(x.shape)


def transformed(rounding: Rounding, turned: bool) -> Rounding:
    return (lambda x: turn(rounding(turn(x)))) if turned else rounding


def best(
    x: Float32, scale: Float32, fitted: bool, rounded: Callable[[Float32, Float32], Float32]
) -> Float32:
    """x rounded under its groups' scales, or under the best of some that are smaller."""
    scale = np.maximum(scale, np.float32(1e-20))
    result = rounded(x, scale)
    error = np.square(result - x).sum(axis=-1, keepdims=True)
    for factor in np.linspace(0.7, 1, 16, endpoint=False, dtype=np.float32) if fitted else ():
        other = rounded(x, scale * factor)
        its_error = np.square(other - x).sum(axis=-1, keepdims=True)
        result = np.where(its_error < error, other, result)
        error = np.minimum(error, its_error)
    return result


def both(name: str, bits: float, rounding: Rounding, first: int = 0, recent: bool = False) -> Rule:
    return Rule(name=name, bits=bits, keys=rounding, values=rounding, first=first, recent=recent)


BEST = asymmetric(32, turned=True, fitted=True)
RULES = (
    both("f32", 32, as_it_is),
    both("bf16", 16, lambda x: x.astype(KV_DTYPES["bf16"]).astype(np.float32)),
    both("int8", 8.5, stored_as("int8")),
    both("fp8_e4m3", 8.5, stored_as("fp8_e4m3")),
    both("4 bits, symmetric, whole head", 4.5, symmetric(None, turned=False)),
    both("4 bits, symmetric, whole head, turned", 4.5, symmetric(None, turned=True)),
    both("4 bits, asymmetric, whole head, turned", 4.5, asymmetric(None, turned=True)),
    both("4 bits, asymmetric, groups of 32", 5, asymmetric(32, turned=False)),
    both("4 bits, asymmetric, groups of 32, turned", 5, asymmetric(32, turned=True)),
    both("4 bits, asymmetric, groups of 32, turned, fitted", 5, BEST),
    both(
        "4 bits, symmetric, groups of 32, turned, fitted",
        5,
        symmetric(32, turned=True, fitted=True),
    ),
    both("4 bits, Gaussian, whole head, turned", 4.25, gaussian),
    both(
        "4 bits, asymmetric, groups of 16, turned, fitted",
        6,
        asymmetric(16, turned=True, fitted=True),
    ),
    both("4 bits, best of groups of 32, first 4 tokens kept", 5, BEST, first=4),
    both(
        "4 bits, best of groups of 32, first 4 and newest up to 64 kept",
        5,
        BEST,
        first=4,
        recent=True,
    ),
    Rule(name="keys 4 bits, values f32", bits=18.5, keys=BEST, values=as_it_is),
    Rule(name="keys f32, values 4 bits", bits=18.5, keys=as_it_is, values=BEST),
    Rule(name="keys int8, values 4 bits", bits=6.75, keys=stored_as("int8"), values=BEST),
)


class RoundingPool(ReferenceKVPool):
    """Keys and values of one sequence, whose pages are 1, 2, ..., rounded by a rule."""

    def __init__(self, spec: KVSpec, pages: int, rule: Rule) -> None:
        super().__init__(spec, pages)
        self._rule = rule
        self._waiting: dict[int, tuple[npt.NDArray[np.int32], Float32, Float32]] = {}

    def store(
        self,
        layer: int,
        slots: npt.NDArray[np.int32],
        keys: Float32,
        values: Float32,
        scales: KVScales | None = None,
    ) -> None:
        if self._rule.recent:
            # The newest step's tokens wait for the next one's.
            super().store(layer, slots, keys, values)
            waiting = self._waiting.get(layer)
            self._waiting[layer] = slots, keys, values
            if waiting is None:
                return
            slots, keys, values = waiting
        kept = (slots - self.spec.page_size < self._rule.first)[:, None, None]
        keys = np.where(kept, keys, self._rule.keys(keys))
        values = np.where(kept, values, self._rule.values(values))
        super().store(layer, slots, keys, values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--only", default="", help="rules whose name holds this")
    parser.add_argument("--tokens", type=int, help="of the text, at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with open_checkpoint(options.model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
        device = ReferenceDevice()
        model = load_model(checkpoint, device)
    text = options.text.read_text(encoding="utf-8")
    tokens = tokenizer.encode(text, add_special=True, parse_special=False)[: options.tokens]
    rows: list[dict[str, Any]] = []
    rules = [RULES[0], *(rule for rule in RULES[1:] if options.only in rule.name)]
    print("| KV | bits an element | perplexity, over float32's | KL divergence | same token |")
    print("|---|---:|---:|---:|---:|")
    for rule, comparison in zip(rules, compared(device, model, tokens, rules), strict=True):
        rows.append(row := figures(rule, comparison))
        print(
            f"| {row['name']} | {row['bits']:g} | {row['perplexity_ratio']:.4f} ± "
            f"{row['perplexity_ratio_stderr']:.4f} | {row['mean_kl']:.4f} | "
            f"{100 * row['agreement']:.1f}% |"
        )
    if options.json:
        report = {"model": options.model.name, "tokens": len(tokens), "rules": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def compared(
    device: ReferenceDevice, model: Model, tokens: Sequence[int], rules: Sequence[Rule]
) -> list[Comparison]:
    """Each rule against the first."""
    specs = model.kv_specs(PAGE_SIZE, "f32")
    pages = 1 - (-len(tokens) // PAGE_SIZE)
    table = [list(range(1, pages))] * len(specs)
    pools = [[RoundingPool(spec, pages, rule) for spec in specs] for rule in rules]
    parts: list[list[Comparison]] = [[] for _ in rules]
    program = device.compile(model.forward)
    for start in range(0, len(tokens) - 1, CHUNK):
        chunk = Chunk(tokens=tokens[start : start + CHUNK], start=start, pages=table)
        batch = make_batch([chunk], [PAGE_SIZE] * len(specs))
        targets = np.array(tokens[start + 1 : start + 1 + CHUNK], np.int64)
        reference: Float32 | None = None
        for own, found in zip(pools, parts, strict=True):
            model.bind(own)
            logits = program(batch, None).result().logits[: len(targets)]
            reference = logits if reference is None else reference
            found.append(compare(logits, reference, targets))
    return [joined(found) for found in parts]


def figures(rule: Rule, comparison: Comparison) -> dict[str, Any]:
    losses = comparison.reference - comparison.logprob
    ratio = math.exp(float(np.mean(losses)))
    return {
        "name": rule.name,
        "bits": rule.bits,
        "perplexity": math.exp(-float(np.mean(comparison.logprob))),
        "perplexity_ratio": ratio,
        "perplexity_ratio_stderr": ratio * float(np.std(losses)) / math.sqrt(len(losses)),
        "mean_kl": float(np.mean(comparison.divergence)),
        "agreement": float(np.mean(comparison.same_top)),
    }


if __name__ == "__main__":
    main()
