"""Every tiny model through the engine on devices that run here, against transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator

import numpy as np
import pytest

from polysilicon.backend import Device, Unavailable
from polysilicon.config import Config
from polysilicon.engine.loading import build_engine
from polysilicon.models.loading import load_model
from polysilicon.plugins import load_plugins
from polysilicon.reference.device import ReferenceDevice
from polysilicon.request import Request, RequestOutput, SamplingParams
from polysilicon.testing.lazy_device import LazyDevice
from polysilicon.weights.checkpoint import open_checkpoint

from .conftest import FOLDER, Tiny, TinyModel, WriteSafetensors

GREEDY = json.loads((FOLDER / "greedy.json").read_text())
SURE_MARGIN = 0.1
"""Where the best two logits are nearer than this, rounding may choose the other."""
BOUND = 1e-3
"""On differences of log-probabilities, in float32."""


@pytest.fixture(params=["reference", "lazy", "cpu"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened = _open(request.param)
    yield opened
    opened.close()


def _open(name: str) -> Device:
    if name == "reference":
        return ReferenceDevice()
    if name == "lazy":
        return LazyDevice()
    for backend in load_plugins().backends:
        if backend.name == name:
            found = backend.probe()
            if isinstance(found, Unavailable):
                pytest.skip(found.reason)
            return backend.open(0, {"activations": "f32", "threads": "1"})
    pytest.skip(f"no backend {name} is installed")


# transformers scales these otherwise once what follows is longer than the context they have here.
@pytest.mark.parametrize("name", sorted(set(GREEDY) - {"llama-dynamic", "llama-longrope-short"}))
def test_prompts_and_greedy_tokens_equal_transformers(
    name: str, tiny: Tiny, write_safetensors: WriteSafetensors, device: Device
) -> None:
    """In chunks of a prompt, beside another sequence, over pages of four tokens."""
    model = tiny(name)
    answers = _serve(model, write_safetensors, device)
    for prompt_end in (len(model.tokens), len(model.tokens) // 2):
        answer = answers[str(prompt_end)]
        expected = model.expected.astype(np.float64)
        expected = expected - np.log(np.exp(expected).sum(axis=-1, keepdims=True))
        scored = [found.logprob for output in answer for found in output.prompt_logprobs]
        places = range(prompt_end - 1)
        wanted = [expected[place, model.tokens[place + 1]] for place in places]
        assert np.abs(np.subtract(scored, wanted)).max() < BOUND
        following = {token: value for output in answer for token, value in output.next_top}
        assert len(following) == 20
        for token, value in following.items():
            assert abs(value - expected[prompt_end - 1, token]) < BOUND
    tokens = [token for output in answers[str(len(model.tokens))] for token in output.ids]
    assert len(tokens) == len(GREEDY[name]["tokens"])
    for token, best, margin in zip(tokens, *GREEDY[name].values(), strict=True):
        if token != best:
            assert margin <= SURE_MARGIN
            break


def _serve(
    model: TinyModel, write_safetensors: WriteSafetensors, device: Device
) -> dict[str, list[RequestOutput]]:
    """The prompt and its first half, each with what follows greedily; by their lengths."""
    with open_checkpoint(write_safetensors(model.legacy, model.weights)) as checkpoint:
        length = len(model.tokens)
        loaded = load_model(checkpoint, device, max_length=length)
        identity = checkpoint.fingerprint()
    # Scalings that depend on the context are settled; the engine may go on past it.
    loaded.config = dataclasses.replace(
        loaded.config, max_length=length + len(GREEDY[model.name]["tokens"])
    )
    page_size = 4 if 4 in device.capabilities.page_sizes else 16
    engine, _ = build_engine(
        Config(page_size=page_size, kv_dtype="f32", kv_pages=40, step_tokens=7, max_sequences=2),
        device,
        loaded,
        identity=identity,
        eos_ids=frozenset(),
    )
    params = SamplingParams(
        max_tokens=len(GREEDY[model.name]["tokens"]),
        temperature=0.0,
        ignore_eos=True,
        logprobs=20,
        prompt_logprobs=1,
    )
    answers: dict[str, list[RequestOutput]] = {}
    for end in (length, length // 2):
        answers[str(end)] = []
        prompt = tuple(model.tokens[:end])
        engine.add(Request(id=str(end), prompt=prompt, params=params))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id].append(output)
    return answers
