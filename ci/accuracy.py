#!/usr/bin/env python3
"""How far a backend is from a float32 forward of the same weights: `ci/accuracy.py MODEL.gguf`.

    ci/accuracy.py SmolLM2-135M-Instruct.Q4_1.gguf --backend metal --activations f16 --kv-dtype f16

Compares with what an independent implementation says of the file (`tests/fixtures`): the mean
|delta log-prob| over the 20 likeliest tokens behind short prompts (`logits`) and one of about 1,400
tokens (`long`), and whether the likeliest token is the same at each position of the continuations
where the best two are more than 0.1 apart. One line of JSON for each; exits with 1 where a mean is
above `--bound`, or a token is another.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from polysilicon.config import Config
from polysilicon.engine.client import Client
from polysilicon.engine.loading import load
from polysilicon.request import Request, RequestOutput, SamplingParams

FIXTURES = Path(__file__).resolve().parents[1] / "tests" / "fixtures"
SURE_MARGIN = 0.1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a file that tests/fixtures knows, by its name")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--activations")
    parser.add_argument("--kv-dtype")
    parser.add_argument("--bound", type=float, default=float("inf"))
    options = parser.parse_args()
    given = {"activations": options.activations, "kv_dtype": options.kv_dtype}
    loaded = load(
        Config(backend=options.backend, max_length=2048, kv_pages=256, max_sequences=8)
        .model_copy(update={key: value for key, value in given.items() if value is not None}),
        options.model,
    )  # fmt: skip
    failed = False
    for kind in ("logits", "long"):
        data = json.loads((FIXTURES / f"{kind}-{options.model.stem}.json").read_text())
        found = compared(loaded.client, data.get("cases", [data]))
        print(
            json.dumps({"fixture": kind, "backend": options.backend, **given, **found}), flush=True
        )
        failed |= found["mean"] > options.bound or found["other_tokens"] > 0
    loaded.client.close()
    return int(failed)


def compared(client: Client, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Differences from the fixture's cases."""
    began = time.monotonic()
    outputs = scored(client, [case["ids"] for case in cases])
    found = [difference(output, case) for output, case in zip(outputs, cases, strict=True)]
    sure = other = 0
    # The long fixture has no continuation.
    continued = [case for case in cases if "greedy" in case]
    outputs = scored(client, [case["ids"] + case["greedy"] for case in continued])
    for output, case in zip(outputs, continued, strict=True):
        entries = (output.prompt_logprobs or ())[len(case["ids"]) - 1 :]
        margins = zip(entries, case["greedy"], case["greedy_margin"], strict=True)
        for entry, truth, margin in margins:
            sure += margin > SURE_MARGIN
            other += margin > SURE_MARGIN and entry.top[0][0] != truth
    return {
        "cases": len(cases), "mean": sum(found) / len(found), "worst": max(found),
        "sure_tokens": sure, "other_tokens": other,
        "seconds": round(time.monotonic() - began, 1),
    }  # fmt: skip


def scored(client: Client, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(max_tokens=0, prompt_logprobs=1, logprobs=20)
    requests = [Request(id=str(i), prompt=tuple(p), params=params) for i, p in enumerate(prompts)]
    outputs = {output.request_id: output for output in client.generate(requests)}
    for output in outputs.values():
        if output.error is not None:
            sys.exit(f"a prompt failed: {output.error}")
    return [outputs[request.id] for request in requests]


def difference(output: RequestOutput, case: dict[str, Any]) -> float:
    """Mean |delta log-prob| over the fixture's top 20 of the last position that are in ours."""
    ours = dict(output.next_top or ())
    common = [abs(ours[token] - value) for token, value in case["last_top"] if token in ours]
    return sum(common) / len(common) if common else float("inf")


if __name__ == "__main__":
    sys.exit(main())
