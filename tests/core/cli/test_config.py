"""The configuration: files, flags over them, and one clear error for each mistake."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from polysilicon.config import SAMPLING_FIELDS, Config, load_config
from polysilicon.errors import ConfigError, RequestError
from polysilicon.request import SamplingParams


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_the_defaults() -> None:
    config = load_config()
    assert (config.model, config.backend, config.device) == (None, "auto", 0)
    assert (config.max_sequences, config.step_tokens, config.prefix_cache) == (64, 512, True)
    assert config.sampling() == SamplingParams()


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().device = 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "page-size: 32\nkv_memory: 2GiB\nstop: [a, b]\nbackend_option: {threads: 4}\n"),
        (
            "c.yml",
            "page_size: 32\nkv-memory: 2147483648\nstop: [a, b]\nbackend-option:\n  threads: 4",
        ),
        (
            "c.toml",
            'page-size = 32\nkv_memory = "2 GiB"\nstop = ["a", "b"]\nbackend_option.threads = 4\n',
        ),
        (
            "c.json",
            json.dumps(
                {
                    "page_size": 32,
                    "kv_memory": "2GiB",
                    "stop": ["a", "b"],
                    "backend_option": {"threads": 4},
                }
            ),
        ),
    ],
)
def test_a_file(tmp_path: Path, name: str, text: str) -> None:
    config = load_config(written(tmp_path / name, text))
    assert config == Config(
        page_size=32, kv_memory=2 << 30, stop=("a", "b"), backend_option={"threads": "4"}
    )


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = written(tmp_path / "c.yaml", "page_size: 32\ndevice: 2\n")
    config = load_config(path, {"page_size": "16"})
    assert (config.page_size, config.device) == (16, 2)


@pytest.mark.parametrize("text", ["", "# nothing\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    assert load_config(written(tmp_path / "c.yaml", text)) == Config()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (12345, 12345),
        ("12345", 12345),
        ("1k", None),
        ("1kB", 1000),
        ("1.5 GiB", 3 << 29),
        ("500MB", 500_000_000),
        ("2tib", 2 << 40),
        ("7B", 7),
        ("0.1B", None),
        ("-1GiB", None),
        ("GiB", None),
        ("1" * 40, None),
        ("nan", None),
    ],
)
def test_bytes(value: object, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="--kv-memory: "):
            load_config(flags={"kv_memory": value})
    else:
        assert load_config(flags={"kv_memory": value}).kv_memory == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.yaml", "kv_dtpye: f16", "unknown name 'kv_dtpye': did you mean 'kv_dtype'?"),
        ("c.yaml", "zzzzzz: 1", "unknown name 'zzzzzz', see `polysilicon run --help`"),
        ("c.yaml", "page-size: 0", "page_size: input should be greater than or equal to 1, not 0"),
        ("c.yaml", "device: one", "device: input should be a valid integer"),
        ("c.yaml", "stop: word", "stop: input should be a valid tuple"),
        ("c.yaml", "- 1", "must hold a mapping of names to values"),
        ("c.yaml", "1: 2", "must hold a mapping of names to values"),
        ("c.yaml", "a: [", "cannot be parsed"),
        ("c.yaml", "a: !!python/object:os.system {}", "cannot be parsed"),
        ("c.yaml", "a: " + "[" * 5000, "cannot be parsed"),
        ("c.toml", "a = ", "cannot be parsed"),
        ("c.json", "{", "cannot be parsed"),
        ("c.json", "[" * 100_000, "cannot be parsed"),
        ("c.ini", "a=1", "name the configuration file .yaml, .toml or .json"),
        ("c.json", " " * (1 << 20) + "{}", "is larger than 1 MiB"),
    ],
)
def test_a_wrong_file(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = written(tmp_path / name, text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be parsed"):
        load_config(path)


def test_a_flag_is_named_as_it_is_written(tmp_path: Path) -> None:
    path = written(tmp_path / "c.yaml", "page_size: 16")
    with pytest.raises(ConfigError, match=r"^--page-size: .*, not 'x'$"):
        load_config(path, {"page_size": "x"})


def test_sampling_puts_what_was_said_over_the_model_s_defaults() -> None:
    config = load_config(flags={"temperature": "0.5", "logit_bias": ["3=1.5"]})
    assert config.sampling(top_p=0.9, temperature=0.7) == SamplingParams(
        temperature=0.5, top_p=0.9, logit_bias={3: 1.5}
    )


def test_what_switches_say() -> None:
    assert load_config(flags={"ignore_eos": False}).sampling(ignore_eos=True).ignore_eos is False


def test_sampling_out_of_range() -> None:
    with pytest.raises(RequestError, match="top_p"):
        load_config(flags={"top_p": "1.5"}).sampling()


def test_every_sampling_parameter_can_be_said() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == SAMPLING_FIELDS
    assert set(Config.model_fields) >= SAMPLING_FIELDS
    assert all(Config.model_fields[name].default is None for name in SAMPLING_FIELDS)
