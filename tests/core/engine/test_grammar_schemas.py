"""Random JSON schemas, each served at high temperature: every answer that stops is an instance.

POLYSILICON_TEST_SCHEMAS sets how many schemas there are; CI takes 500.
"""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, Phase, given, settings

from polysilicon.engine.client import Client
from polysilicon.reference.device import ReferenceDevice
from polysilicon.request import FinishReason, Grammar, Request, SamplingParams
from polysilicon.sampling.grammar import Grammars
from polysilicon.testing.engine_bench import EngineBench
from polysilicon.testing.json_schemas import json_schemas
from polysilicon.testing.tiny_models import EOS, VOCABULARY, tiny_llama
from polysilicon.testing.tiny_text import write_text_side
from polysilicon.tokenizer import Tokenizer

COUNT = int(os.environ.get("POLYSILICON_TEST_SCHEMAS", "60"))
BATCH = 30
FORMATS = jsonschema.FormatChecker(["date", "ipv4", "uuid", "email"])


def schemas() -> list[dict[str, Any]]:
    """Fresh ones at every run."""
    drawn: list[dict[str, Any]] = []

    @settings(
        max_examples=COUNT, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    @given(json_schemas())
    def draw(schema: dict[str, Any]) -> None:
        drawn.append(schema)

    draw()
    return drawn


def test_every_answer_is_an_instance_of_its_schema(tmp_path: Path) -> None:
    bench = EngineBench(ReferenceDevice(), tiny_llama(), tmp_path, max_length=512)
    write_text_side(tmp_path)
    tokenizer = Tokenizer.from_directory(tmp_path)
    engine = bench.engine(step_tokens=64)
    engine.serve_grammars(Grammars(tokenizer, vocab_size=VOCABULARY, eos_ids=frozenset({EOS})))
    client = Client(engine, tokenizer)
    reasons: collections.Counter[FinishReason] = collections.Counter()
    drawn = schemas()
    for first in range(0, len(drawn), BATCH):
        batch = dict(enumerate(drawn[first : first + BATCH], first))
        texts = dict.fromkeys(batch, "")
        for output in client.generate(
            Request(
                id=str(index),
                prompt=(5 + index % 200,) * 3,
                params=SamplingParams(max_tokens=240, temperature=1.5, top_k=index % 2 * 8),
                grammar=Grammar(kind="json_schema", text=json.dumps(schema)),
            )
            for index, schema in batch.items()
        ):
            index = int(output.request_id)
            texts[index] += output.text
            if output.finish_reason is None:
                continue
            reasons[output.finish_reason] += 1
            assert output.error is None, (batch[index], output.error)
            if output.finish_reason is FinishReason.STOP:
                jsonschema.validate(
                    json.loads(texts[index]),
                    batch[index],
                    cls=jsonschema.Draft202012Validator,
                    format_checker=FORMATS,
                )
    assert set(reasons) <= {FinishReason.STOP, FinishReason.LENGTH}
    assert reasons[FinishReason.STOP] > len(drawn) / 3
    engine.close()
