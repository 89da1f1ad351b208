"""`quantize` from end to end: what is written is what was meant, and failures leave nothing."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from polysilicon.commands import quantize as quantize_command
from polysilicon.commands.application import run
from polysilicon.commands.quantize import Method, Target
from polysilicon.errors import ConfigError, ModelError, PolysiliconError
from polysilicon.models.loading import read_config
from polysilicon.progress import Advance
from polysilicon.quantization import quantize as quantize_module
from polysilicon.quantization.directory import DirectoryOutput
from polysilicon.quantization.gguf_output import GGUF_FORMATS, GGUFOutput
from polysilicon.quantization.layouts import LAYOUTS
from polysilicon.quantization.quantize import TARGETS, quantize
from polysilicon.quantization.safetensors_file import SafetensorsWriter
from polysilicon.tokenizer import Tokenizer
from polysilicon.weights.checkpoint import Checkpoint, open_checkpoint
from polysilicon.weights.gguf import GGUFFile

from .conftest import GEMMA3, LLAMA, Logits, WriteModel
from .meant import meant

TEXT = "the cat and the other hat, 12 times a day; then the rain came down on them. " * 40


@pytest.mark.parametrize(
    ("to", "options"),
    [
        *((to, {}) for to in TARGETS),
        ("compressed-tensors", {"bits": 8, "group": 32}),
        ("gptq", {"bits": 8}),
        ("gptq", {"group": 32}),
        *(("mlx", {"bits": bits, "group": 32}) for bits in (2, 3, 5, 6, 8)),
    ],
)
@pytest.mark.parametrize("config", [LLAMA, GEMMA3], ids=["llama", "gemma3"])
def test_our_readers_read_exactly_what_was_meant(
    write_model: WriteModel,
    tmp_path: Path,
    config: dict[str, Any],
    to: str,
    options: dict[str, Any],
) -> None:
    out = tmp_path / "out"
    with open_checkpoint(write_model(config)) as checkpoint:
        expected = meant(checkpoint, to, tmp_path / "meant", **options)
        quantize(checkpoint, out, to=to, **options)
        stated = read_config(checkpoint)[1]
    with open_checkpoint(out) as written:
        assert set(written.tensors) == set(expected)
        for name, values in expected.items():
            held = written.weight(name).dequantize()
            # Gemma's 1 on norms is added for GGUF and taken away again, in float32.
            loose = 3e-7 if to in GGUF_FORMATS and "norm" in name else 0
            np.testing.assert_allclose(held, values, rtol=loose, atol=loose, err_msg=name)
        read = read_config(written)[1]
    assert (read.layers, read.heads, read.windows) == (stated.layers, stated.heads, stated.windows)


@pytest.mark.parametrize(
    ("to", "method"),
    [
        *((to, "gptq") for to in ("compressed-tensors", "gptq", "awq", "mlx", "q4_0", "q5_1")),
        *((to, "awq") for to in ("compressed-tensors", "q4_0")),
    ],
)
def test_calibrated_models_are_nearer_to_the_dense_one(
    write_model: WriteModel, tmp_path: Path, logits: Logits, to: str, method: str
) -> None:
    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        tokens = _tokens(checkpoint)
        expected = logits(checkpoint, tokens)
        errors = []
        for name in ("rtn", method):
            out = tmp_path / f"{name}-{to}"
            quantize(
                checkpoint, out, to=to, method=name, calibration=None if name == "rtn" else TEXT
            )
            with open_checkpoint(out) as written:
                errors.append(np.square(logits(written, tokens) - expected).mean())
    assert errors[1] < errors[0]


def _tokens(checkpoint: Checkpoint) -> list[int]:
    return Tokenizer.from_directory(checkpoint.path).encode(
        TEXT, add_special=False, parse_special=False
    )[:100]


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (LLAMA, {}),
        (LLAMA, {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 1}),
        (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        (
            LLAMA,
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
        ),
        ({**LLAMA, "architectures": ["MistralForCausalLM"]}, {"sliding_window": 8}),
        (GEMMA3, {}),
    ],
    ids=["llama", "one layer, biases", "linear", "llama3", "mistral", "gemma3"],
)
def test_a_model_goes_to_gguf_and_back(
    write_model: WriteModel,
    tmp_path: Path,
    logits: Logits,
    config: dict[str, Any],
    changes: dict[str, Any],
) -> None:
    folder = write_model(config, **changes)
    with open_checkpoint(folder) as checkpoint:
        dense = logits(checkpoint)
        quantize(checkpoint, tmp_path / "model.gguf", to="q8_0")
    with open_checkpoint(tmp_path / "model.gguf") as middle:
        eight = logits(middle)
        quantize(middle, tmp_path / "back", to="compressed-tensors", bits=8, group=32)
    with open_checkpoint(tmp_path / "back") as last:
        back = logits(last)
    spread = dense.std()
    assert np.abs(eight - dense).mean() < 0.05 * spread
    # The values of Q8_0 are on the grid of 8 bits and groups of 32 again; what stays dense is f16.
    assert np.abs(back - eight).mean() < 0.05 * spread
    first = Tokenizer.from_directory(folder)
    for other in (
        Tokenizer.from_gguf(GGUFFile(tmp_path / "model.gguf").metadata),
        Tokenizer.from_directory(tmp_path / "back"),
    ):
        for text in (TEXT, "Grüße 123\n\t<|im_end|> the"):
            for special in (True, False):
                assert other.encode(text, add_special=special, parse_special=special) == (
                    first.encode(text, add_special=special, parse_special=special)
                )
        assert other.eos_id == first.eos_id


def test_a_quantised_checkpoint_is_quantised_again(write_model: WriteModel, tmp_path: Path) -> None:
    with open_checkpoint(write_model(LLAMA, dtype=ml_dtypes.bfloat16)) as checkpoint:
        quantize(checkpoint, tmp_path / "eight", to="mlx", bits=8)
    with open_checkpoint(tmp_path / "eight") as checkpoint:
        quantize(checkpoint, tmp_path / "four", to="gptq")
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "gptq"
    assert "quantization" not in config
    assert config["torch_dtype"] == "bfloat16"
    with open_checkpoint(tmp_path / "four") as checkpoint:
        assert checkpoint.weight("model.layers.1.mlp.up_proj.weight").encoding == "affine:4/64"


def test_what_belongs_to_a_model_is_carried(write_model: WriteModel, tmp_path: Path) -> None:
    folder = write_model(LLAMA)
    (folder / "generation_config.json").write_text('{"eos_token_id": 262}')
    with open_checkpoint(folder) as checkpoint:
        quantize(checkpoint, tmp_path / "out", to="awq")
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({}, {"to": "gptq", "bits": 3}, "has 4, 8 bits, not 3"),
        ({}, {"to": "awq", "group": 48}, "has groups of 32, 64, 128, not 48"),
        ({}, {"to": "mlx", "group": 128}, "has 64 inputs, which groups of 128 do not divide"),
        (
            {"intermediate_size": 40},
            {"to": "compressed-tensors"},
            "has 40 inputs, which groups of 32 do not divide: write GGUF",
        ),
        ({"intermediate_size": 36}, {"to": "gptq", "group": 32}, "36 inputs"),
        ({}, {"to": "q4_0", "bits": 4}, "settles bits and groups"),
        ({}, {"to": "gptq", "method": "gptq"}, "--calibrate FILE"),
        ({}, {"to": "gptq", "calibration": TEXT}, "looks at no text"),
        ({}, {"to": "gptq", "method": "gptq", "calibration": "t"}, "fewer than 2 tokens"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    write_model: WriteModel,
    tmp_path: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    said: str,
) -> None:
    folder = write_model(LLAMA, **changes)
    with open_checkpoint(folder) as checkpoint, pytest.raises(ConfigError, match=said):
        quantize(checkpoint, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == [folder]


def test_inputs_that_no_block_divides_stay_dense_in_gguf(
    write_model: WriteModel, tmp_path: Path
) -> None:
    with open_checkpoint(write_model(LLAMA, intermediate_size=40)) as checkpoint:
        notes = quantize(checkpoint, tmp_path / "out.gguf", to="q4_k_m")
    with open_checkpoint(tmp_path / "out.gguf") as written:
        assert written.tensors["blk.0.ffn_down.weight"].type == "F16"
        assert written.tensors["blk.0.attn_q.weight"].type == "Q5_0"
        assert written.tensors["output.weight"].type == "Q8_0"
    assert any("blocks of 256" in note for note in notes)


def test_a_mix_gives_more_bits_to_the_ends(write_model: WriteModel, tmp_path: Path) -> None:
    folder = write_model(
        LLAMA, hidden_size=256, intermediate_size=256, num_hidden_layers=8, tie_word_embeddings=True
    )
    with open_checkpoint(folder) as checkpoint:
        quantize(checkpoint, tmp_path / "out.gguf", to="q4_k_m")
    with open_checkpoint(tmp_path / "out.gguf") as written:
        types = {name: info.type for name, info in written.tensors.items()}
    assert types["token_embd.weight"] == "Q6_K"
    down = [types[f"blk.{layer}.ffn_down.weight"] for layer in range(8)]
    assert [kind == "Q6_K" for kind in down] == [True, False, False, True, False, False, True, True]
    assert {types[f"blk.{layer}.ffn_up.weight"] for layer in range(8)} == {"Q4_K"}
    assert types["output_norm.weight"] == "F32"


def test_an_out_that_is_there_is_left_alone(write_model: WriteModel, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("kept")
    with (
        open_checkpoint(write_model(LLAMA)) as checkpoint,
        pytest.raises(ConfigError, match="exists already"),
    ):
        quantize(checkpoint, tmp_path / "out", to="q4_0")
    assert (tmp_path / "out").read_text() == "kept"
    with (
        open_checkpoint(write_model(LLAMA)) as checkpoint,
        pytest.raises(ConfigError, match="is not a directory"),
    ):
        quantize(checkpoint, tmp_path / "missing" / "out", to="q4_0")


@pytest.mark.parametrize("to", ["gptq", "q4_0"])
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full: make room"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (KeyboardInterrupt(), None),
    ],
)
def test_a_failure_leaves_nothing_behind(
    write_model: WriteModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    to: str,
    raised: BaseException,
    said: str | None,
) -> None:
    folder = write_model(LLAMA)

    def fail(*arguments: object) -> None:
        raise raised

    for output in (DirectoryOutput, GGUFOutput):
        monkeypatch.setattr(output, "close", fail)
    wanted = KeyboardInterrupt if isinstance(raised, KeyboardInterrupt) else PolysiliconError
    with open_checkpoint(folder) as checkpoint, pytest.raises(wanted, match=said):
        quantize(checkpoint, tmp_path / "out", to=to)
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_leaves_nothing_behind(
    write_model: WriteModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    folder = write_model(LLAMA)

    def end(*arguments: object) -> None:
        assert callable(signal.getsignal(number))
        signal.raise_signal(number)

    monkeypatch.setattr(GGUFOutput, "close", end)
    with pytest.raises(SystemExit) as ended:
        run(["quantize", str(folder), str(tmp_path / "out.gguf"), "--to", "q8_0"])
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) is signal.SIG_DFL
    assert list(tmp_path.iterdir()) == [folder]


def test_weights_that_are_no_numbers_are_refused(write_model: WriteModel, tmp_path: Path) -> None:
    folder = write_model(LLAMA)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-4:] = np.float32(np.nan).tobytes()
    (folder / "model.safetensors").write_bytes(data)
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(ModelError, match="infinities or NaN"),
    ):
        quantize(checkpoint, tmp_path / "out", to="q4_0")
    assert list(tmp_path.iterdir()) == [folder]


def test_texts_that_no_utf_8_spells(write_model: WriteModel, tmp_path: Path) -> None:
    """JSON can escape half of a surrogate pair: a directory's JSON does so again."""
    folder = write_model(LLAMA, said="\ud800 \u00e9")
    with open_checkpoint(folder) as checkpoint:
        quantize(checkpoint, tmp_path / "out", to="mlx")
    written = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert written["said"] == "\ud800 \u00e9"
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "\udfff"}))
    with (
        open_checkpoint(folder) as checkpoint,
        pytest.raises(ModelError, match="half of a surrogate pair"),
    ):
        quantize(checkpoint, tmp_path / "out.gguf", to="q8_0")
    assert set(tmp_path.iterdir()) == {folder, tmp_path / "out"}


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    writer = SafetensorsWriter(tmp_path, {"format": "pt"}, shard_bytes=1000)
    random = np.random.default_rng(0)
    arrays = {f"t{i}": random.standard_normal((7, 13)).astype(np.float16) for i in range(12)}
    arrays["wide"] = random.standard_normal((30, 30)).astype(np.float32)
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close()
    (tmp_path / "config.json").write_text("{}")
    assert len(list(tmp_path.glob("model-*-of-00004.safetensors"))) == 4
    with open_checkpoint(tmp_path) as written:
        for name, array in arrays.items():
            np.testing.assert_array_equal(written.weight(name).dequantize(), array)


def test_progress_ends_at_its_total(write_model: WriteModel, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []

    @contextlib.contextmanager
    def watch(label: str) -> Iterator[Advance]:
        yield lambda done, total: seen.append((done, total))

    with open_checkpoint(write_model(LLAMA)) as checkpoint:
        quantize(
            checkpoint,
            tmp_path / "out",
            to="gptq",
            method="gptq",
            calibration=TEXT,
            progress=watch,
        )
    done = [pair[0] for pair in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


def test_a_long_calibration_text_may_be_cut_within_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "text"
    path.write_text("aé")
    monkeypatch.setattr(quantize_command, "_MOST_TEXT_BYTES", 2)
    assert quantize_command._text(path) == "a"


def test_layouts_and_methods_are_what_the_command_offers() -> None:
    assert {target.value for target in Target} == set(TARGETS) == {*LAYOUTS, *GGUF_FORMATS}
    assert {method.value for method in Method} == set(quantize_module.METHODS)


def test_the_command_writes_and_says_what_it_cannot(
    write_model: WriteModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, text = write_model(LLAMA), tmp_path / "out", tmp_path / "text"
    text.write_text(TEXT)
    command = ["quantize", str(folder), str(out), "--to"]
    assert run([*command, "mlx", "--method", "gptq", "--calibrate", str(text)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    with open_checkpoint(out) as written:
        assert written.weight("model.embed_tokens.weight").encoding == "affine:4/64"
    assert run([*command, "mlx"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert run([*command, "mlx", "--calibrate", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"text\xff")
    binary = ["--method", "awq", "--calibrate", str(tmp_path / "binary")]
    assert run(["quantize", str(folder), str(tmp_path / "other"), "--to", "mlx", *binary]) == 2
    assert "not UTF-8 at byte 4" in capsys.readouterr().err
    assert run([*command, "exl2"]) == 2
    capsys.readouterr()
    for name, target in (("folder.gguf", "awq"), ("file", "q8_0")):
        assert run(["quantize", str(folder), str(tmp_path / name), "--to", target]) == 2
        assert "give OUT" in capsys.readouterr().err
        assert not (tmp_path / name).exists()
    assert run(["quantize", str(folder), str(tmp_path / "k.gguf"), "--to", "q4_k_m"]) == 0
    assert "blocks of 256" in capsys.readouterr().err
