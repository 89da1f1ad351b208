"""Flags made from the configuration's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from polysilicon.commands.options import configured
from polysilicon.config import SAMPLING_FIELDS, Config
from polysilicon.errors import ConfigError

FIELDS = set(Config.model_fields) - {"model"}
seen: list[tuple[str, str | None, bool, Config]] = []
app = typer.Typer()


@app.command()
@configured(FIELDS)
def run(
    prompt: str,
    model: Annotated[str | None, typer.Argument()] = None,
    *,
    config: Config,
    stats: bool = False,
) -> None:
    """Say something."""
    seen.append((prompt, model, stats, config))


def call(*arguments: str) -> tuple[str, str | None, bool, Config]:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen.pop()


def test_nothing_said() -> None:
    assert call("hello") == ("hello", None, False, Config())


def test_the_command_s_own_parameters() -> None:
    assert call("hello", "smollm2", "--stats")[:3] == ("hello", "smollm2", True)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["--page-size", "32"], {"page_size": 32}),
        (["--kv-memory", "1GiB"], {"kv_memory": 1 << 30}),
        (["--no-prefix-cache"], {"prefix_cache": False}),
        (["--prefix-cache", "--deterministic"], {"deterministic": True}),
        (["--no-skip-special-tokens"], {"skip_special_tokens": False}),
        (["--temperature", "0"], {"temperature": 0.0}),
        (["--stop", "a", "--stop", "b,c"], {"stop": ("a", "b,c")}),
        (["--stop-token-ids", "1", "--stop-token-ids", "2"], {"stop_token_ids": (1, 2)}),
        (["--bad-words", "1,2", "--bad-words", "3"], {"bad_words": ((1, 2), (3,))}),
        (["--logit-bias", "3=-1.5"], {"logit_bias": {3: -1.5}}),
        (
            ["--backend-option", "threads=4", "--backend-option", "path=a=b"],
            {"backend_option": {"threads": "4", "path": "a=b"}},
        ),
        (["--block-plugins", "opal"], {"block_plugins": ("opal",)}),
    ],
)
def test_flags(arguments: list[str], changes: dict[str, Any]) -> None:
    assert call("hello", *arguments)[3] == Config(**changes)


def test_a_file_with_a_flag_over_it(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: gemma3-270m\ndevice: 1\nprefix-cache: false\n")
    config = call("hello", "--config", str(path), "--device", "0")[3]
    assert config == Config(model="gemma3-270m", device=0, prefix_cache=False)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--page-size", "x"),
        ("--bad-words", "1,x"),
        ("--logit-bias", "3"),
        ("--kv-memory", "1 sheep"),
        ("--backend-option", "=4"),
    ],
)
def test_a_wrong_value(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: "):
        call("hello", flag, value)


def test_every_field_is_a_flag_with_its_description() -> None:
    result = CliRunner().invoke(app, ["--help"], terminal_width=200, env={"COLUMNS": "200"})
    for name in FIELDS:
        assert f"--{name.replace('_', '-')}" in result.output
    assert "Sampling" in result.output
    assert FIELDS & SAMPLING_FIELDS
