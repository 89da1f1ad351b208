"""A tiny random GPT-2, an architecture that we do not define, as a GGUF file and in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from polysilicon.config import Config
from polysilicon.engine.engine import Engine
from polysilicon.engine.loading import Loaded, load
from polysilicon.request import Request, SamplingParams
from polysilicon_llamacpp import loading

Float64 = npt.NDArray[np.float64]
LAYERS, WIDTH, HEADS, INNER, CONTEXT = 2, 64, 4, 96, 256
BYTES = [chr(b) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174 else "" for b in range(256)]
EOS = 256
VOCABULARY = 259
BOUND = 0.05
"""By how much two logits may be off: llama.cpp looks GELU up in half precision. They vary by 4."""


@dataclasses.dataclass(frozen=True)
class TinyGPT2:
    weights: Mapping[str, npt.NDArray[np.float32]]

    @classmethod
    def random(cls, seed: int) -> TinyGPT2:
        rng = np.random.default_rng(seed)

        def normal(*shape: int, scale: float) -> npt.NDArray[np.float32]:
            return (scale * rng.standard_normal(shape)).astype(np.float32)

        weights = {
            "token_embd.weight": normal(VOCABULARY, WIDTH, scale=0.5),
            "position_embd.weight": normal(CONTEXT, WIDTH, scale=0.25),
            "output_norm.weight": normal(WIDTH, scale=0.1) + np.float32(1),
            "output_norm.bias": normal(WIDTH, scale=0.1),
        }
        shapes = {"attn_qkv": (3 * WIDTH, WIDTH), "attn_output": (WIDTH, WIDTH),
                  "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER)}  # fmt: skip
        for layer in range(LAYERS):
            for norm in ("attn_norm", "ffn_norm"):
                weights[f"blk.{layer}.{norm}.weight"] = normal(WIDTH, scale=0.1) + np.float32(1)
                weights[f"blk.{layer}.{norm}.bias"] = normal(WIDTH, scale=0.1)
            for name, (rows, columns) in shapes.items():
                weights[f"blk.{layer}.{name}.weight"] = normal(
                    rows, columns, scale=1.5 * columns**-0.5
                )
                weights[f"blk.{layer}.{name}.bias"] = normal(rows, scale=0.1)
        return cls(weights)

    def write(self, path: Path) -> None:
        gguf = pytest.importorskip("gguf")
        writer = gguf.GGUFWriter(path, "gpt2")
        writer.add_context_length(CONTEXT)
        writer.add_embedding_length(WIDTH)
        writer.add_block_count(LAYERS)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_layer_norm_eps(1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        # Byte-level BPE writes the bytes that do not print as the letters from U+0100 on.
        others = iter(range(0x100, 0x200))
        tokens = [text or chr(next(others)) for text in BYTES]
        writer.add_token_list([*tokens, "<|endoftext|>", "th", "in"])
        writer.add_token_types([1] * 256 + [3, 1, 1])
        writer.add_token_merges(["t h", "i n"])
        writer.add_eos_token_id(EOS)
        for name, values in self.weights.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def logits(self, tokens: Sequence[int]) -> Float64:
        """Float64 `[T, V]`: GPT-2 as published (pre-norm, tanh GELU, tied output)."""
        w = {name: values.astype(np.float64) for name, values in self.weights.items()}
        count = len(tokens)
        x = w["token_embd.weight"][list(tokens)] + w["position_embd.weight"][:count]
        mask = np.triu(np.full((count, count), -np.inf), 1)

        def linear(values: Float64, name: str) -> Float64:
            return values @ w[f"{name}.weight"].T + w[f"{name}.bias"]

        def norm(values: Float64, name: str) -> Float64:
            centred = values - values.mean(-1, keepdims=True)
            scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

        for layer in range(LAYERS):
            block = f"blk.{layer}"
            projected = linear(norm(x, f"{block}.attn_norm"), f"{block}.attn_qkv")
            q, k, v = projected.reshape(count, 3, HEADS, -1).transpose(1, 2, 0, 3)
            scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]) + mask
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            mixed = scores / scores.sum(-1, keepdims=True) @ v
            x = x + linear(mixed.transpose(1, 0, 2).reshape(count, -1), f"{block}.attn_output")
            h = linear(norm(x, f"{block}.ffn_norm"), f"{block}.ffn_up")
            h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
            x = x + linear(h, f"{block}.ffn_down")
        return norm(x, "output_norm") @ w["token_embd.weight"].T


@dataclasses.dataclass
class Answer:
    ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    text: str = ""
    pieces: int = 0
    cached: int = 0


def serve(loaded: Loaded, requests: Iterable[Request]) -> dict[tuple[str, int], Answer]:
    """Run requests as one batch; the pages are checked at every step."""
    answers: dict[tuple[str, int], Answer] = {}
    for request in requests:
        loaded.client.submit(request)
    while loaded.client.has_work:
        for output in loaded.client.poll():
            assert output.error is None, output.error
            answer = answers.setdefault((output.request_id, output.choice), Answer())
            answer.ids += output.ids
            answer.logprobs += [item.logprob for item in output.logprobs]
            answer.prompt_logprobs += [item.logprob for item in output.prompt_logprobs]
            answer.text += output.text
            answer.pieces += bool(output.text)
            answer.cached += output.num_cached_tokens
        loaded.engine.kv.check_integrity()
    return answers


def greedy(max_tokens: int = 8, **changes: object) -> SamplingParams:
    values: dict[str, object] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}
    return SamplingParams(**values | changes)  # type: ignore[arg-type]


@dataclasses.dataclass
class Judge:
    """Holds answers to the float64 forward. decided: tokens that no rounding could have changed."""

    model: TinyGPT2
    judged: int = 0
    decided: int = 0

    def __call__(
        self, requests: Iterable[Request], answers: Mapping[tuple[str, int], Answer]
    ) -> None:
        for request in requests:
            for choice in range(request.params.n):
                answer = answers[request.id, choice]
                assert len(answer.ids) == request.params.max_tokens
                self._judge(request, answer)

    def _judge(self, request: Request, answer: Answer) -> None:
        tokens = [*request.prompt, *answer.ids]
        logits = self.model.logits(tokens)
        totals = np.logaddexp.reduce(logits, axis=1)
        start = len(request.prompt)
        for index, token in enumerate(answer.ids, start):
            row = logits[index - 1]
            self.judged += 1
            self.decided += int((row >= row.max() - BOUND).sum() == 1)
            assert row[token] >= row.max() - BOUND, (request.id, index)
        for first, values in ((start, answer.logprobs), (1, answer.prompt_logprobs)):
            for index, value in enumerate(values, first):
                truth = logits[index - 1, tokens[index]] - totals[index - 1]
                assert abs(value - truth) <= BOUND, (request.id, index)


@pytest.fixture(scope="session")
def tiny() -> TinyGPT2:
    return TinyGPT2.random(20)


@pytest.fixture(scope="session")
def tiny_path(tiny: TinyGPT2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt2") / "tiny.gguf"
    tiny.write(path)
    return path


@pytest.fixture
def judge(tiny: TinyGPT2) -> Iterator[Judge]:
    """Checks after the test that its answers could have been wrong."""
    judge = Judge(tiny)
    yield judge
    assert judge.judged >= 20
    assert judge.decided >= 0.8 * judge.judged, (judge.decided, judge.judged)


@pytest.fixture
def opened(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Loaded]]:
    """Loads the tiny model through llama.cpp: `opened(**config)`, without a trial."""
    monkeypatch.setattr(loading, "extra_buffers_work", lambda path: True)
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    everything: list[Loaded] = []

    def build(**config: object) -> Loaded:
        # More threads than idle cores wait for each other in a spin.
        values = {"kv_dtype": "f32", "max_sequences": 16, "backend_option": {"threads": "1"}}
        loaded = load(Config.model_validate(values | config), tiny_path)
        everything.append(loaded)
        return loaded

    yield build
    for loaded in everything:
        loaded.client.close()
        loaded.checkpoint.close()


def count_preemptions(engine: Engine) -> int:
    return engine.scheduler.num_preemptions
