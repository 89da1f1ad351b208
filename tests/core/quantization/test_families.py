"""`quantize` of every family: mixtures of experts, latent attention, fused projections."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

from polysilicon.backend import Batch
from polysilicon.errors import ModelError
from polysilicon.models.decoder import DecoderModel
from polysilicon.ops import ModelOutputs, Ops
from polysilicon.progress import Advance
from polysilicon.quantization.awq import Scaling
from polysilicon.quantization.calibration import run
from polysilicon.quantization.layouts import LAYOUTS
from polysilicon.quantization.quantize import quantize
from polysilicon.quantization.source import ModelSource
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.checkpoint import open_checkpoint
from polysilicon.weights.encodings import FLOAT_TABLES, Dense, Float32

from .conftest import Logits
from .families import FAMILIES, MIXTURES, family_config, write_family
from .meant import meant

TEXT = "the cat and the other hat, 12 times a day; then the rain came down on them. " * 40

DIRECTORIES = [
    (name, to) for name in FAMILIES for to in LAYOUTS if not (name == "gpt_oss" and to != "mlx")
]


@pytest.mark.parametrize(("name", "to"), DIRECTORIES)
def test_directories_hold_exactly_what_was_meant(
    tmp_path: Path, logits: Logits, name: str, to: str
) -> None:
    """And the engine computes with them what it does with the same values, stored plain."""
    with open_checkpoint(write_family(tmp_path / "model", family_config(name))) as checkpoint:
        expected = meant(checkpoint, to, tmp_path / "meant")
        quantize(checkpoint, tmp_path / "out", to=to)
    with open_checkpoint(tmp_path / "out") as written:
        assert set(written.tensors) == set(expected)
        for tensor, values in expected.items():
            np.testing.assert_array_equal(written.weight(tensor).dequantize(), values, tensor)
        quantized = {
            tensor.split(".", 3)[-1]
            for tensor in expected
            if written.weight(tensor).encoding.startswith("affine")
        }
        computed = logits(written)
    assert not any("gate.weight" in tensor or "router" in tensor for tensor in quantized)
    if name in MIXTURES:
        assert sum("expert" in tensor or "switch_mlp" in tensor for tensor in quantized) >= 3
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(family_config(name)))
    safetensors.numpy.save_file(expected, plain / "model.safetensors")
    with open_checkpoint(plain) as checkpoint:
        same = logits(checkpoint)
    # What latent attention merges is computed from 16 bits where it was quantised.
    tolerance = 5e-3 if name.startswith("deepseek") else 1e-4
    assert np.abs(computed - same).max() <= tolerance * np.abs(same).max()


@pytest.mark.parametrize("to", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "glm"])
def test_gguf_files_hold_exactly_what_was_meant(
    tmp_path: Path, logits: Logits, name: str, to: str
) -> None:
    with open_checkpoint(write_family(tmp_path / "model", family_config(name))) as checkpoint:
        dense = logits(checkpoint)
        expected = meant(checkpoint, to, tmp_path / "meant")
        quantize(checkpoint, tmp_path / "out.gguf", to=to)
    with open_checkpoint(tmp_path / "out.gguf") as written:
        assert set(written.tensors) == set(expected)
        for tensor, values in expected.items():
            held = written.weight(tensor).dequantize().reshape(values.shape)
            np.testing.assert_array_equal(held, values, tensor)
        if name in MIXTURES:
            kind = written.tensors["blk.1.ffn_gate_exps.weight"].type
            assert kind == {"q8_0": "Q8_0", "q4_k_m": "Q5_0"}[to]
            assert written.tensors["blk.1.ffn_gate_inp.weight"].type == "F32"
        computed = logits(written)
    if to == "q8_0" and name not in MIXTURES:
        assert np.abs(computed - dense).mean() < 0.05 * dense.std()
    # A token whose experts are nearly tied may be sent to others.
    assert np.median(np.abs(computed - dense)) < 0.3 * dense.std()


def test_gguf_says_that_no_layer_is_a_mixture(tmp_path: Path, logits: Logits) -> None:
    config = family_config("deepseek_v2") | {"first_k_dense_replace": 3}
    with open_checkpoint(write_family(tmp_path / "model", config)) as checkpoint:
        dense = logits(checkpoint)
        quantize(checkpoint, tmp_path / "out.gguf", to="q8_0")
    with open_checkpoint(tmp_path / "out.gguf") as written:
        assert not any("exps" in name for name in written.tensors)
        assert np.abs(logits(written) - dense).mean() < 0.05 * dense.std()


def test_refusals_name_what_can_be_done(tmp_path: Path) -> None:
    with open_checkpoint(write_family(tmp_path / "oss", family_config("gpt_oss"))) as checkpoint:
        for to in ("compressed-tensors", "gptq", "awq"):
            with pytest.raises(ModelError, match=r"tensors of their own.*Choose --to mlx"):
                quantize(checkpoint, tmp_path / "out", to=to)
        quantize(checkpoint, tmp_path / "oss.gguf", to="q8_0")
    with (
        open_checkpoint(tmp_path / "oss.gguf") as checkpoint,
        pytest.raises(ModelError, match=r"no config\.json is written for gpt-oss"),
    ):
        quantize(checkpoint, tmp_path / "out", to="mlx")
    with (
        open_checkpoint(write_family(tmp_path / "glm", family_config("glm"))) as checkpoint,
        pytest.raises(ModelError, match="no GGUF metadata is written for glm"),
    ):
        quantize(checkpoint, tmp_path / "out.gguf", to="q8_0")
    mixed = family_config("qwen2_moe") | {"mlp_only_layers": [1]}
    with (
        open_checkpoint(write_family(tmp_path / "mixed", mixed)) as checkpoint,
        pytest.raises(ModelError, match=r"cannot say what this model has \(experts\)"),
    ):
        quantize(checkpoint, tmp_path / "out.gguf", to="q8_0")


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_mixtures_go_to_gguf_and_back(tmp_path: Path, logits: Logits, name: str) -> None:
    with open_checkpoint(write_family(tmp_path / "model", family_config(name))) as checkpoint:
        quantize(checkpoint, tmp_path / "model.gguf", to="q8_0")
    with open_checkpoint(tmp_path / "model.gguf") as middle:
        eight = logits(middle)
        for to in ("compressed-tensors", "mlx"):
            quantize(middle, tmp_path / to, to=to, bits=8, group=32)
    for to in ("compressed-tensors", "mlx"):
        with open_checkpoint(tmp_path / to) as last:
            assert np.median(np.abs(logits(last) - eight)) < 0.05 * eight.std()


def test_stacks_become_experts_of_their_own(tmp_path: Path) -> None:
    """From MLX's stacks; each matrix is rounded from the values that it has there."""
    folder = write_family(tmp_path / "model", family_config("mixtral"))
    with open_checkpoint(folder) as checkpoint:
        quantize(checkpoint, tmp_path / "stacks", to="mlx", bits=8, group=32)
    with open_checkpoint(tmp_path / "stacks") as checkpoint:
        stack = checkpoint.weight(
            "model.layers.1.block_sparse_moe.switch_mlp.down_proj.weight"
        ).dequantize()
        quantize(checkpoint, tmp_path / "out", to="awq", group=32)
    with open_checkpoint(tmp_path / "out") as written:
        for expert in range(3):
            name = f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight"
            error = written.weight(name).dequantize() - stack[expert]
            assert np.abs(error).max() < 0.15 * np.abs(stack[expert]).max()
    stated = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.block_sparse_moe.gate" in stated["modules_to_not_convert"]


def _tokens(folder: Path) -> list[int]:
    return Tokenizer.from_directory(folder).encode(TEXT, add_special=False, parse_special=False)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_calibrated_experts_are_nearer_to_the_dense_ones(
    tmp_path: Path, logits: Logits, name: str, method: str
) -> None:
    folder = write_family(tmp_path / "model", family_config(name))
    with open_checkpoint(folder) as checkpoint:
        tokens = _tokens(folder)[:100]
        expected, errors = logits(checkpoint, tokens), []
        for chosen in ("rtn", method):
            out = tmp_path / chosen
            text = None if chosen == "rtn" else TEXT
            quantize(checkpoint, out, to="compressed-tensors", method=chosen, calibration=text)
            with open_checkpoint(out) as written:
                errors.append(np.abs(logits(written, tokens) - expected).mean())
    assert errors[1] < errors[0]


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_experts_that_see_few_tokens_are_rounded_to_nearest(tmp_path: Path, method: str) -> None:
    config = family_config("mixtral") | {"num_local_experts": 3, "num_experts_per_tok": 1}
    with open_checkpoint(write_family(tmp_path / "model", config)) as checkpoint:
        notes = quantize(
            checkpoint, tmp_path / "out", to="mlx", method=method, calibration=TEXT[:100]
        )
        expected = meant(checkpoint, "mlx", tmp_path / "meant")
    assert any(note.startswith("6 of 6 experts saw fewer than 128 tokens") for note in notes)
    with open_checkpoint(tmp_path / "out") as written:
        name = "model.layers.1.block_sparse_moe.switch_mlp.down_proj.weight"
        if method == "gptq":
            np.testing.assert_array_equal(written.weight(name).dequantize(), expected[name])
        assert written.weight(name).shape == (3, 64, 128)


@pytest.mark.parametrize("name", MIXTURES)
def test_scales_leave_mixtures_what_they_are(
    tmp_path: Path, logits: Logits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    random = np.random.default_rng(9)
    folder = write_family(tmp_path / "model", family_config(name))

    def factors(width: int) -> Float32:
        return np.exp(random.standard_normal(width) * 0.5).astype(np.float32)

    with open_checkpoint(folder) as checkpoint:
        source = ModelSource(checkpoint, gguf=False, stacks=True)
        scaling = Scaling(source)
        at = "layers.1"
        readers = scaling.mixture_readers([f"{at}.expert_gate.weight", f"{at}.expert_up.weight"])
        assert f"{at}.router.weight" in readers
        scaling.add_mixture(readers, factors(64))
        down = [f"{at}.expert_down.weight"]
        if name == "gpt_oss":
            # What its activation makes of `up` is not proportional to it.
            assert not scaling.takes(down)
        else:
            experts, _, width = source.shapes[down[0]]
            for expert in range(0, experts, 2):
                scaling.add(down, factors(width), expert)
        if f"{at}.shared_down.weight" in source.shapes:
            shared = [f"{at}.shared_down.weight"]
            scaling.add(shared, factors(source.shapes[shared[0]][1]))
        expected = logits(checkpoint)
        scaled = {}
        for unit_name, unit in source.units.items():
            matrices = [
                scaling.applied(unit, source.values(unit, matrix), matrix)
                for matrix in range(unit.matrices)
            ]
            values = matrices[0] if len(unit.shape) < 3 else np.stack(matrices)
            assert values.shape == unit.shape
            scaled[unit_name] = Dense(array=values)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(family_config(name)))
    safetensors.numpy.save_file(
        {key: value.array for key, value in scaled.items()}, plain / "model.safetensors"
    )
    with open_checkpoint(plain) as checkpoint:
        found = logits(checkpoint)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-3 * np.abs(expected).max())


def test_a_norm_that_both_blocks_read_is_not_scaled(tmp_path: Path) -> None:
    config = family_config("stablelm")
    keys = [f"layers.1.{part}.weight" for part in "qkv"]
    for parallel in (False, True):
        folder = tmp_path / str(parallel)
        write_family(folder, config | {"use_parallel_residual": parallel})
        with open_checkpoint(folder) as checkpoint:
            scaling = Scaling(ModelSource(checkpoint, gguf=False))
        assert scaling.takes(keys) != parallel
        assert scaling.takes(["layers.1.down.weight"])


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"])
def test_calibration_computes_what_the_engine_does(
    tmp_path: Path, logits: Logits, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Though each matrix is read on its own, and latent attention is not merged."""
    states: list[Float32] = []

    def forward(model: DecoderModel, ops: Ops, batch: Batch) -> ModelOutputs:
        hidden = model._layer_states(ops, batch)
        states.append(hidden[-1])
        return ModelOutputs(logits=np.zeros((0, 1), np.float32), hidden=hidden)

    monkeypatch.setattr(DecoderModel, "forward", forward)
    visited: set[str] = set()

    class Plain:
        """Leaves all weights as they are."""

        def table(self, key: str, rows: npt.NDArray[np.int64]) -> Float32:
            return source.parameter(key).take_rows(rows).dequantize()

        def mixture(self, keys: Sequence[str], x: Float32) -> None:
            visited.add("mixture")

        def visit(
            self, keys: Sequence[str], x: Float32, expert: int | None = None
        ) -> Sequence[Float32]:
            visited.update(keys)
            results = []
            for key in keys:
                unit, matrix = source.place(key, expert)
                rows = source.rows(unit, key)
                values = source.values(unit, matrix)
                results.append(values if rows is None else values[rows])
            return results

    with open_checkpoint(write_family(tmp_path / "model", family_config(name))) as checkpoint:
        source = ModelSource(checkpoint, gguf=True)
        run(source, [list(range(5, 45))], Plain())
        logits(checkpoint)
    linear = {part.key for unit in source.units.values() if unit.linear for part in unit.parts}
    assert linear - visited == {"embedding.weight", "head.weight"}
    calibrated, served = states
    # What the engine merges is rounded to 16 bits.
    tolerance = 2e-3 if name.startswith("deepseek") else 1e-5
    assert np.abs(calibrated - served).max() <= tolerance * np.abs(served).max()


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_progress_ends_at_its_total(tmp_path: Path, name: str, method: str) -> None:
    seen: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def watch(label: str) -> Iterator[Advance]:
        yield lambda done, total: seen.append((done, total))

    with open_checkpoint(write_family(tmp_path / "model", family_config(name))) as checkpoint:
        quantize(
            checkpoint, tmp_path / "out", to="mlx", method=method, calibration=TEXT, progress=watch
        )
    done = [pair[0] for pair in seen]
    assert done == sorted(done)
    # The last two are equal where all that was to be done was counted.
    assert done[-2:] == [seen[0][1]] * 2


def test_mxfp4_stacks_of_gpt_oss_are_read_expert_by_expert(tmp_path: Path) -> None:
    folder, random = (
        write_family(tmp_path / "model", family_config("gpt_oss")),
        np.random.default_rng(4),
    )
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    expected = {}
    for name in list(weights):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, inputs, outputs = weights.pop(name).shape
        codes = random.integers(0, 16, (experts, outputs, inputs), np.uint8)
        exponents = random.integers(121, 124, (experts, outputs, inputs // 32), np.uint8)
        scale = np.exp2(exponents.astype(np.float32) - 127).repeat(32, axis=-1)
        expected[name] = FLOAT_TABLES["f4_e2m1"][codes] * scale
        pairs = codes.reshape(experts, outputs, inputs // 32, 16, 2)
        weights[f"{name}_blocks"] = pairs[..., 0] | pairs[..., 1] << np.uint8(4)
        weights[f"{name}_scales"] = exponents
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    config = family_config("gpt_oss") | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    with open_checkpoint(folder) as checkpoint:
        quantize(checkpoint, tmp_path / "out", to="mlx", bits=8, group=32)
    at = "model.layers.1.mlp.experts"
    fused = expected[f"{at}.gate_up_proj"]
    meant_values = {
        "gate_proj": fused[:, 0::2],
        "up_proj": fused[:, 1::2],
        "down_proj": expected[f"{at}.down_proj"],
    }
    with open_checkpoint(tmp_path / "out") as written:
        for name, values in meant_values.items():
            held = written.weight(f"{at}.{name}.weight").dequantize()
            # Half of a step of 8 bits over a group's range, and what bf16 makes of scale and bias.
            bound = 1.6 * np.ptp(values.reshape(-1, 32), axis=-1) / 255 + 1e-7
            assert (np.abs(held - values).reshape(-1, 32).max(axis=-1) <= bound).all()
