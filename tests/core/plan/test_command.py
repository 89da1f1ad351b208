"""`polysilicon plan` as a user meets it."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest

import polysilicon.lane_reports
from polysilicon.commands.application import run
from polysilicon.plan.units import duration, size
from polysilicon.reference.device import ReferenceDevice

WriteConfig = Callable[..., Path]


@pytest.fixture(autouse=True)
def one_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on every machine, and no time lost on probing vendors' libraries."""
    monkeypatch.setattr(polysilicon.lane_reports, "kept_reports", dict)
    monkeypatch.setenv("POLYSILICON_PLUGINS", "-cpu,-cuda,-rocm,-metal,-llamacpp")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = run(["plan", *arguments])
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "Traceback" not in err
    return out


def failed(capsys: pytest.CaptureFixture[str], status: int, *arguments: str) -> str:
    assert run(["plan", *arguments]) == status
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


def test_side_by_side(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config("llama-2-7b"))
    out = printed(
        capsys, folder, "--hardware", "a100, H100,l4", "--quantize", "none,w4", "--context", "4096",
        "--concurrency", "8", "--price", "1,2,0.5",
    )  # fmt: skip
    lines = out.splitlines()
    assert "6,738,415,616 parameters, 32 layers, context 4,096" in lines[0]
    assert "KV of a token in bf16: 512.0 KiB in full" in lines[0]
    heads = re.split(r"\s{2,}", lines[1].strip())
    assert heads == [
        f"{card}, {scheme}" for card in ("a100", "h100", "l4") for scheme in ("none", "w4")
    ]
    rows = {
        cells[0]: cells[1:] for cells in (re.split(r"\s{2,}", line.strip()) for line in lines[2:])
    }
    assert {len(cells) for cells in rows.values()} == {6}
    assert rows["KV, full"] == ["16.0 GiB"] * 6
    assert rows["Fits"][:4] == ["yes"] * 4
    assert rows["Fits"][4].startswith("no, ")
    assert rows["Most sequences of 4,096 tokens"][4] != "none"
    assert all(
        cell.endswith("tok/s") for cell in rows["Decode, 8 streams at 4,096 tokens, at most"]
    )
    assert rows["Backends"] == ["reference native"] * 6
    assert rows["Products"][0] == "bf16, 312 Top/s"
    assert "Adapters" not in rows


def test_json(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config("gemma-3-1b"))
    found = json.loads(
        printed(
            capsys, folder, "--json", "--hardware", "mi300x,m4-max", "--kv-dtype", "int8",
            "--input-tokens", "1000", "--output-tokens", "512", "--quantize", "fp8",
            "--adapters", "2", "--adapter-rank", "4", "--step-tokens", "256",
        )
    )  # fmt: skip
    assert found["load"] == {
        "context": 8192, "concurrency": 32, "input_tokens": 1000, "output_tokens": 512,
        "kv_dtype": "int8", "page_size": 16, "step_tokens": 256, "adapters": 2, "adapter_rank": 4,
    }  # fmt: skip
    # k and v of one head of 256 codes and a float32 scale each, 4 and 22 layers.
    assert found["kv_token_bytes"] == {"full": 4 * 520, "sliding-512": 22 * 520}
    first, second = found["plans"]
    assert (first["hardware"], second["hardware"]) == ("mi300x", "m4-max")
    assert first["total_bytes"] == (
        first["weights_bytes"] + sum(first["kv_bytes"].values()) + first["adapters_bytes"]
        + first["workspace_bytes"]
    )  # fmt: skip
    assert first["fits"] is True
    assert first["memory"] == {
        "value": 192e9, "source": "AMD Instinct MI300X accelerator data sheet, 2023",
    }  # fmt: skip
    assert first["products"]["dtype"] == "fp8"
    assert first["e2e_s"] == pytest.approx(first["ttft_s"] + 511 * first["tpot_s"])
    assert second["prefill_tokens_per_s"] is None
    assert first["input_dollars_per_million"] is None
    assert any(entry["encoding"].startswith("float:f8_e4m3") for entry in first["encodings"])
    dense = next(e for e in first["encodings"] if e["encoding"] == "dense:bf16")
    assert "safetensors BF16" in dense["formats"]
    assert "gguf BF16" in dense["formats"]
    assert dense["support"] == {"reference": "native"}


def test_what_stands_in_a_configuration_file(
    write_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_config("llama-2-7b")
    file = tmp_path / "serve.yaml"
    file.write_text(
        f"model: {folder}\nkv_dtype: f32\nstep_tokens: 64\npage_size: 32\nmax_length: 100\n"
        "quantize: w8\n"
    )
    found = json.loads(printed(capsys, "--json", "--hardware", "h200", "--config", str(file)))
    assert found["kv_token_bytes"] == {"full": 1 << 20}
    load = found["load"]
    assert (load["step_tokens"], load["page_size"], load["context"]) == (64, 32, 100)
    assert [entry["quantize"] for entry in found["plans"]] == ["w8"]


def test_this_machine(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ReferenceDevice, "ceilings", lambda self, nbytes: {"bandwidth": 1e10, "f32": 1e11}
    )
    found = json.loads(printed(capsys, str(write_config("qwen3-0.6b")), "--json"))
    (only,) = found["plans"]
    assert (only["hardware"], only["hardware_name"]) == ("this", "numpy")
    assert only["products"] == {
        "dtype": "f32", "value": 1e11, "source": "measured by backend reference",
    }  # fmt: skip
    assert only["bandwidth"]["value"] == 1e10
    assert "MiB over and over" in only["bandwidth"]["source"]
    assert only["memory"]["source"] == "backend reference"


def test_backends_that_only_a_lane_has_run(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {
        "capabilities": {
            "compute": "f16", "kv_dtypes": ["f16"], "page_sizes": [16], "encodings": ["dense:*"],
        }
    }  # fmt: skip
    executor = {"capabilities": None}
    monkeypatch.setattr(
        polysilicon.lane_reports, "kept_reports", lambda: {"far": report, "whole": executor}
    )
    folder = str(write_config("qwen3-0.6b"))
    out = printed(capsys, folder, "--hardware", "h100", "--quantize", "none,w4")
    assert re.split(r"\s{2,}", out.splitlines()[-1].strip()) == [
        "Backends", "reference native, far native", "reference native, far transcoded",
    ]  # fmt: skip


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.images: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        if tag == "img":
            self.images.append(dict(attrs)["src"] or "")


def test_the_page(
    write_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.html"
    folder = str(write_config("gemma-3-1b", torch_dtype=None))
    hostile = Path(folder).rename(tmp_path / "<b>model")
    printed(capsys, str(hostile), "--hardware", "h100,m3-ultra,l4", "--html", str(file))
    text = file.read_text()
    page = Page(text)
    assert page.tags["th"] == 4
    assert page.tags["img"] == 2
    assert all(src.startswith("data:image/svg+xml;base64,") for src in page.images)
    assert "http" not in text.replace("http-equiv", "")
    assert "<b>" not in text
    assert "&lt;b&gt;model" in text
    assert "NVIDIA H100 Tensor Core GPU datasheet" in text
    assert "names no dtype" in text


def test_one_model_of_one_token_of_context(
    write_config: WriteConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The least that there is, plots included."""
    folder = str(write_config("qwen2.5-0.5b", max_position_embeddings=2))
    file = tmp_path / "least.html"
    out = printed(capsys, folder, "--hardware", "l4", "--concurrency", "1", "--html", str(file))
    assert out.count("Decode, 1 stream at 2 tokens") == 1
    assert "Longest context of 1 sequence " in out
    assert Page(file.read_text()).tags["img"] == 2


def test_a_page_without_matplotlib(
    write_config: WriteConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name)
    )
    folder = str(write_config("llama-2-7b"))
    message = failed(capsys, 2, folder, "--html", "x.html")
    assert message == "error: --html needs matplotlib: pip install 'polysilicon[bench]'\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h1000"], "Known are a100, "),
        (["--hardware", "h100,,l4"], "--hardware takes a name"),
        (["--hardware", ""], "--hardware takes a name"),
        (["--quantize", "w3"], "Known are none, w4, w8, fp8"),
        (["--quantize", ","], "--quantize takes a name"),
        (["--context", "100000"], "the 4,096 tokens of"),
        (["--context", "many"], "'--context'"),
        (["--concurrency", "0"], "--concurrency 0"),
        (["--concurrency", "-1"], "--concurrency -1"),
        (["--price", "free"], "--price takes dollars"),
        (["--price", "0"], "--price takes dollars"),
        (["--price", "nan"], "--price takes dollars"),
        (["--price", "1,2"], "as many as --hardware has names (1)"),
        (["--kv-dtype", "int3"], "--kv-dtype 'int3'"),
        (["--step-tokens", "0"], "--step-tokens"),
        (["--page-size", "-1"], "--page-size"),
        (["--adapters", "-1"], "--adapters"),
        (["--input-tokens", "4096"], "--input-tokens"),
        (["--html", "no/such/folder/x.html"], "no/such/folder/x.html cannot be written"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], message: str, write_config: WriteConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = str(write_config("llama-2-7b"))
    wanted = ["--hardware", "h100", *arguments]
    assert message in failed(capsys, 2, folder, *wanted)


def test_a_model_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert "neither an existing path" in failed(capsys, 1, "./none", "--hardware", "h100")


def test_notes_go_to_stderr(write_config: WriteConfig, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_config("gpt-oss-20b"))
    assert run(["plan", folder, "--hardware", "b200"]) == 0
    out, err = capsys.readouterr()
    assert "polysilicon: config.json names no dtype" in err
    assert "polysilicon:" not in out
    assert "fp4, 9,000 Top/s" in out


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.0 KiB"), (1.5 * 2**30, "1.5 GiB"), (10**400, None)],
)
def test_sizes(value: int, text: str | None) -> None:
    assert size(value).endswith(" PiB") if text is None else size(value) == text


def test_durations() -> None:
    assert duration(0.0123) == "12.3 ms"
    assert duration(12) == "12.00 s"
