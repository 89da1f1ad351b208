"""The commands that answer, on the real default model and the reference backend."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from polysilicon.commands.application import run

FIXTURES = Path(__file__).parents[2] / "fixtures"
PARIS = "The capital of France is"


@pytest.fixture
def polysilicon(capsys, smollm2_path):
    def call(command: str, *arguments: str, model: bool = True) -> tuple[int, str, str]:
        words = [command, *([str(smollm2_path)] if model else []), *arguments]
        if command not in ("tokenize",):
            words += ["--backend", "reference"]
        status = run(words)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def write_lines(path: Path, lines: list[dict]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def read_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_run_streams_the_answer_and_prints_times(polysilicon):
    status, out, err = polysilicon("run", PARIS, "--max-tokens", "3", "--stats")
    assert status == 0
    assert out.startswith(" Paris.")
    for word in ("backend reference", "TTFT", "TPOT", "tokens/s", "prompt 5 tokens"):
        assert word in err


def test_run_reads_the_prompt_from_standard_input(polysilicon, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PARIS))
    status, out, _ = polysilicon("run", "-", "--max-tokens", "1")
    assert (status, out) == (0, " Paris\n")


def test_run_takes_names_from_a_configuration_file_under_its_flags(polysilicon, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("max_tokens: 1\nstop: [nothing]\nstep-tokens: 2\n")
    status, out, _ = polysilicon("run", PARIS, "--config", str(file))
    assert (status, out) == (0, " Paris\n")
    status, out, _ = polysilicon("run", PARIS, "--config", str(file), "--max-tokens", "2")
    assert (status, out) == (0, " Paris.\n")


def test_run_of_a_model_without_a_prompt_says_what_is_missing(polysilicon, smollm2_path):
    for model in ("smollm2", "hf:owner/repo", str(smollm2_path)):
        status, out, err = polysilicon("run", model, model=False)
        assert (status, out) == (2, "")
        assert err.startswith(f"error: {model} is a model, and a prompt is missing: ")
        assert err.endswith(f'polysilicon run {model} "PROMPT"\n')


def test_run_ends_at_a_stop_text(polysilicon):
    status, out, _ = polysilicon("run", PARIS, "--max-tokens", "9", "--stop", "ris")
    assert (status, out) == (0, " Pa\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PARIS, "--temperature", "-1"), "temperature"),
        ((PARIS, "--top-p", "many"), "--top-p"),
        ((PARIS, "--kv-dtype", "f8"), "--kv-dtype f8"),
        ((PARIS, "--max-length", "3"), "--max-length"),
        ((PARIS, "--device", "7"), "device 7"),
        ((PARIS, "--kv-memory", "10"), "--kv-memory"),
        ((PARIS, "--logit-bias", "999999=1"), "logit_bias"),
        (("",), "prompt"),
    ],
)
def test_bad_flags_end_with_one_line_that_names_the_mend(polysilicon, arguments, message):
    status, out, err = polysilicon("run", *arguments)
    assert status in (1, 2)
    assert out == ""
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in err


def test_chat_answers_line_by_line_and_remembers(polysilicon, monkeypatch):
    asked = "My name is Ada.\n\nWhat is my name?\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked))
    status, out, err = polysilicon("chat", "--max-tokens", "16", "--stats")
    assert status == 0
    assert len([line for line in err.splitlines() if "TTFT" in line]) == 2
    # The second turn finds the first one's KV.
    assert "(0 cached)" in err
    assert err.count("(0 cached)") == 1
    assert out.strip()


def test_chat_takes_a_template_file(polysilicon, monkeypatch, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{PARIS}\n"))
    status, out, _ = polysilicon("chat", "--max-tokens", "1", "--chat-template", str(template))
    assert (status, out) == (0, " Paris\n")
    status, _, err = polysilicon("chat", "--chat-template", str(tmp_path / "missing"))
    assert status == 2
    assert "--chat-template" in err


def test_tokenize_gives_the_fixture_its_ids(polysilicon, tmp_path):
    cases = json.loads((FIXTURES / "tokenize-SmolLM2-135M-Instruct.Q4_1.json").read_text())["cases"]
    file = write_lines(tmp_path / "in.jsonl", [{"text": c["text"], "n": 1} for c in cases])
    status, out, _ = polysilicon("tokenize", file)
    assert status == 0
    assert read_lines(out) == [{**case, "n": 1} for case in cases]


def test_score_reports_prompt_log_probabilities_and_the_next_top(polysilicon, tmp_path):
    fixture = json.loads((FIXTURES / "logits-SmolLM2-135M-Instruct.Q4_1.json").read_text())
    cases = fixture["cases"][:3]
    lines = [{"prompt": cases[0]["prompt"], "tag": "a"}, *({"ids": c["ids"]} for c in cases[1:])]
    status, out, _ = polysilicon("score", write_lines(tmp_path / "in.jsonl", lines))
    assert status == 0
    scored = read_lines(out)
    assert scored[0]["tag"] == "a"
    for line, case in zip(scored, cases, strict=True):
        assert line["ids"] == case["ids"]
        assert len(line["top"]) == 20
        assert line["prompt_logprobs"] == pytest.approx(case["prompt_logprobs"], abs=0.02)
        assert line["top"][0] == pytest.approx(case["last_top"][0], abs=0.02)


def test_generate_runs_lines_with_their_own_sampling_fields_in_order(polysilicon, tmp_path):
    lines = [
        {"prompt": PARIS, "max_tokens": 9, "stop": ["."]},
        {"prompt": PARIS, "max_tokens": 2, "tag": 5},
        {"prompt": PARIS, "max_tokens": 3, "temperature": 1.0, "seed": 3, "n": 2, "logprobs": 1},
        {"ids": [504], "max_tokens": 1, "prompt_logprobs": 0},
    ]
    file = write_lines(tmp_path / "in.jsonl", lines)
    status, out, _ = polysilicon("generate", file)
    assert status == 0
    results = read_lines(out)
    assert [result["max_tokens"] for result in results] == [9, 2, 3, 3, 1]
    first, second, *choices, last = results
    assert (first["text"], first["finish_reason"]) == (" Paris", "stop")
    assert (second["text"], second["finish_reason"], second["tag"]) == (" Paris.", "length", 5)
    assert second["output_ids"] == [7042, 30]
    assert [choice["choice"] for choice in choices] == [0, 1]
    for choice in choices:
        assert [entry["id"] for entry in choice["output_logprobs"]] == choice["output_ids"]
        assert all(entry["logprob"] <= 0 for entry in choice["output_logprobs"])
    assert last["prompt_logprobs"] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[1]\n", "one JSON object a line"),
        ('{"prompt": 3}\n', '"prompt"'),
        ('{"ids": []}\n', '"ids"'),
        ('{"ids": [1, true]}\n', '"ids"'),
        ('{"ids": [99999999]}\n', "line 1"),
        ('\n{"prompt": "a", "temperature": "hot"}\n', "line 2"),
        ('{"prompt": "a", "top_p": 7}\n', "line 1"),
        ('{"prompt": "a", "temprature": 1}\n', "did you mean 'temperature'"),
    ],
)
def test_bad_lines_are_named_before_anything_runs(polysilicon, tmp_path, content, message):
    file = tmp_path / "in.jsonl"
    file.write_text(content)
    status, out, err = polysilicon("generate", str(file))
    assert status in (1, 2)
    assert out == ""
    assert message in err.splitlines()[-1]


def test_generate_holds_outputs_to_what_their_lines_say(polysilicon, tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    said = [
        {"choice": [" Paris", " Rome"]}, {"regex": " [A-Z]{2}"}, {"grammar": 'start: " x" | " y"'},
        {"json": schema}, {"json": json.dumps(schema)}, {"json": {"not": {}}},
    ]  # fmt: skip
    file = write_lines(
        tmp_path / "lines.jsonl",
        [{"prompt": PARIS, "structured_outputs": one, "max_tokens": 60} for one in said],
    )
    status, out, err = polysilicon("generate", file)
    lines = read_lines(out)
    assert status == 1
    assert "'not' at #" in err
    assert [line["finish_reason"] for line in lines] == ["stop"] * 5 + ["error"]
    assert lines[0]["text"] == " Paris"
    assert lines[1]["text"].strip().isupper()
    assert lines[2]["text"] in (" x", " y")
    assert [type(json.loads(line["text"])["a"]) for line in lines[3:5]] == [bool, bool]
    assert "'not' at #" in lines[5]["error"]


@pytest.mark.parametrize("said", [{}, {"json": {}, "regex": "a"}, {"regex": 3}, "json", {"x": 1}])
def test_generate_refuses_what_outputs_cannot_be_held_to(polysilicon, tmp_path, said):
    file = write_lines(tmp_path / "lines.jsonl", [{"prompt": PARIS, "structured_outputs": said}])
    status, out, err = polysilicon("generate", file)
    assert (status, out) == (2, "")
    assert "line 1" in err
    assert "structured_outputs" in err
