"""`polysilicon eval` as a user meets it: table, report, thresholds, wrong usage."""

from __future__ import annotations

import base64
import importlib.util
import json
import re
from pathlib import Path

import pytest

from polysilicon.evals.evaluation import Evaluation, Subject
from polysilicon.evals.thresholds import failures, threshold

CHOICES = {"context": "ab", "choices": ["<c>", "d e"], "answer": 0}


@pytest.fixture
def tasks(tmp_path):
    path = tmp_path / "tasks.jsonl"
    lines = [CHOICES, {**CHOICES, "answer": 1}, {"prompt": "a", "answer": "?", "max_tokens": 1}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_table_has_both_models(evaluated, tiny, coarse, text):
    status, out, _ = evaluated(coarse, "--text", text, "--against", tiny)
    assert status == 0
    title, *lines = out.splitlines()
    assert title == (
        "text.txt: 299 tokens scored as Hugging Face does: windows of 512 tokens, 256 further "
        "each; each token once"
    )
    cells = {row[0]: row[1:] for row in (re.split(r" {2,}", line.strip()) for line in lines)}
    assert cells["figure"] == [
        "model backend=reference kv_dtype=f32",
        "reference: model backend=reference kv_dtype=f32",
    ]
    assert len(cells["Perplexity"]) == 2
    assert all(re.fullmatch(r"[\d,.]+ ± [\d,.]+", cell) for cell in cells["Perplexity"])
    assert len(cells["KL divergence, mean (nats)"]) == 1
    assert re.fullmatch(r"[\d.]+% ± [\d.]+%", cells["Agreement with the reference"][0])
    assert "of no probability" not in out


def test_the_table_of_tasks(evaluated, tiny, tasks):
    status, out, _ = evaluated(tiny, "--tasks", tasks)
    assert status == 0
    assert out.startswith("tasks.jsonl: 3 tasks, texts generated greedily\n")
    assert "of choices, by log-probability   50.00% ± 50.00%" in out
    assert "of exact matches" in out


@pytest.mark.parametrize("against", [False, True])
def test_the_report_of_a_text(evaluated, tiny, coarse, text, tmp_path, against):
    path = tmp_path / "report.html"
    other = ("--against", tiny) if against else ()
    arguments = ("--text", text, *other, "--report", path, "--max-perplexity", 1)
    status, out, err = evaluated(coarse, *arguments)
    assert status == 1
    page = path.read_text()
    # The figures are those of the table.
    perplexity = re.search(r"Perplexity +([\d,.]+ ± [\d,.]+)", out)
    assert perplexity is not None
    assert f"<td>{perplexity[1]}</td>" in page
    assert err.splitlines()[-1].removeprefix("error: ") in page
    heading = "Where the models differ the most" if against else "The least expected tokens"
    assert heading in page
    assert page.count('<td class="long">') == 10
    (image,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    svg = base64.b64decode(image).decode()
    assert "Perplexity up to here" in svg
    assert ("KL divergence" in svg) == against
    assert not re.search(r'(src|href)="http', page)


def test_the_report_s_notable_tokens_are_those_that_diverge_the_most(
    evaluated, tiny, coarse, text, tmp_path
):
    path = tmp_path / "report.html"
    arguments = ("--text", text, "--against", tiny, "--report", path, "--json")
    status, out, _ = evaluated(coarse, *arguments)
    assert status == 0
    row = r'<td class="text">(.*?)</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td><td>(.*?)</td>'
    rows = re.findall(row, path.read_text(), re.DOTALL)
    divergences = [float(row[3]) for row in rows]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[0] == pytest.approx(json.loads(out)["kl_max"], abs=1e-4)


def test_a_report_of_texts_that_no_utf_8_spells(evaluated, tiny, tmp_path):
    path, tasks = tmp_path / "report.html", tmp_path / "halves.jsonl"
    tasks.write_text(json.dumps({"context": "a\ud800", "choices": ["\udfff", "b"], "answer": 1}))
    status, _, _ = evaluated(tiny, "--tasks", tasks, "--report", path)
    assert status == 0
    assert path.read_text(encoding="utf-8").rstrip().endswith("</html>")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is full")
def test_a_report_that_does_not_fit_names_the_file(evaluated, tiny, text):
    status, _, err = evaluated(tiny, "--text", text, "--report", "/dev/full")
    assert status == 2
    assert err.endswith("error: /dev/full cannot be written: No space left on device\n")


def test_the_report_of_tasks_escapes_what_models_and_files_say(evaluated, tiny, tasks, tmp_path):
    path = tmp_path / "report.html"
    arguments = ("--tasks", tasks, "--against", tiny, "--report", path, "--json")
    status, _, _ = evaluated(tiny, *arguments)
    assert status == 0
    page = path.read_text()
    assert "Wrong answers" in page
    assert "&lt;c&gt;" in page
    assert "<c>" not in page
    assert f"{tasks}, line 3" in page


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-perplexity", "1.5"], r"perplexity is [\d.]+, above --max-perplexity 1.5"),
        (["--max-kl", "0.0001"], r"mean_kl is [\d.]+, above --max-kl 0.0001"),
        (["--max-delta", "0"], r"mean_delta is [\d.]+, above --max-delta 0"),
        (["--min-agreement", "1"], r"agreement is 0.[\d]+, below --min-agreement 1"),
        (["--max-kl", "0", "--max-delta", "0"], r"mean_kl is .*; mean_delta is .*"),
    ],
)
def test_a_threshold_of_a_text_that_does_not_hold(evaluated, tiny, coarse, text, arguments, reason):
    status, out, err = evaluated(coarse, "--text", text, "--against", tiny, *arguments, "--json")
    assert status == 1
    assert re.fullmatch(f"error: {reason}", err.splitlines()[-1])
    assert "; ".join(json.loads(out)["failures"]) == err.splitlines()[-1].removeprefix("error: ")


def test_thresholds_that_hold(evaluated, tiny, coarse, text, tasks):
    bounds = ("--max-perplexity", 1e6, "--max-kl", 10, "--max-delta", 10, "--min-agreement", 0)
    status, out, err = evaluated(coarse, "--text", text, "--against", tiny, *bounds, "--json")
    assert status == 0, err
    assert json.loads(out)["failures"] == []
    status, _, err = evaluated(tiny, "--tasks", tasks, "--min-accuracy", 0.3)
    assert status == 0, err
    status, _, err = evaluated(tiny, "--tasks", tasks, "--min-accuracy", 0.34)
    assert status == 1
    assert err.splitlines()[-1] == "error: accuracy is 0.333333, below --min-accuracy 0.34"


def test_what_is_not_finite_keeps_no_threshold():
    bounds = [
        threshold("--max-perplexity", "perplexity", 9.0),
        threshold("--min-agreement", "agreement", 0.0, at_least=True),
    ]
    figures = {"perplexity": float("inf"), "agreement": float("nan")}
    assert failures(bounds, figures) == [
        "perplexity is inf, above --max-perplexity 9",
        "agreement is nan, below --min-agreement 0",
    ]
    assert failures(bounds, {"perplexity": 9.0, "agreement": 0.0}) == []


def test_json_holds_no_infinity():
    subject = Subject(model="m", backend="b", settings={})
    evaluation = Evaluation(
        subject=subject,
        reference=None,
        source="s",
        how="h",
        figures={"perplexity": float("inf"), "mean_kl": float("nan"), "windows": 3, "x": None},
    )
    written = json.loads(json.dumps(evaluation.json(), allow_nan=False))
    assert (written["perplexity"], written["mean_kl"], written["x"]) == (None, None, None)
    assert written["windows"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "eval takes one of --text FILE and --tasks FILE.jsonl"),
        (["--text", "TEXT", "--tasks", "TASKS"], "eval takes one of --text FILE and"),
        (["--tasks", "TASKS", "--context", "9"], "--context and --stride go with --text"),
        (["--tasks", "TASKS", "--convention", "llamacpp"], "go with --text: leave them out"),
        (["--text", "TEXT", "--context", "0"], "--context must be at least 4, not 0"),
        (["--text", "TEXT", "--context", "x"], "Invalid value for '--context'"),
        (["--text", "TEXT", "--convention", "hf"], "Invalid value for '--convention'"),
        (["--text", "TEXT", "--stride", "0"], "--stride must lie between 1 and"),
        (["--text", "TEXT", "--max-kl", "1"], "--max-kl needs --against REFERENCE"),
        (["--text", "TEXT", "--max-delta", "1"], "--max-delta needs --against REFERENCE"),
        (["--tasks", "TASKS", "--min-agreement", "1"], "--min-agreement needs --against"),
        (["--tasks", "TASKS", "--max-perplexity", "1"], "--max-perplexity needs --text"),
        (["--text", "TEXT", "--min-accuracy", "1"], "--min-accuracy needs --tasks"),
        (["--tasks", "TASKS", "--min-accuracy", "90"], "a share between 0 and 1, not 90"),
        (["--tasks", "TASKS", "--min-accuracy", "nan"], "a share between 0 and 1, not nan"),
        (["--text", "TEXT", "--max-perplexity", "nan"], "a number of 0 or more, not nan"),
        (["--text", "TEXT", "--max-perplexity", "-1"], "a number of 0 or more, not -1"),
        (["--text", "TEXT", "--against-with", "kv-dtype=f32"], "needs --against REFERENCE"),
        (["--text", "TEXT", "--against", "M", "--against-with", "x"], "takes NAME=VALUE, not 'x'"),
        (
            ["--text", "TEXT", "--against", "M", "--against-with", "backnd=cpu"],
            "'backnd' is no engine option: did you mean 'backend'?",
        ),
        (
            ["--text", "TEXT", "--against", "M", "--against-with", "temperature=1"],
            "'temperature' is no engine option",
        ),
        (
            ["--text", "TEXT", "--against", "M", "--against-with", "page-size=x"],
            "--against-with: --page-size: ",
        ),
        (["--text", "TEXT", "--report", "/no/such/folder/x.html"], "name a file in a directory"),
    ],
)
def test_wrong_usage_is_one_error(evaluated, tiny, text, tasks, arguments, message):
    files = {"TEXT": str(text), "TASKS": str(tasks)}
    status, out, err = evaluated(tiny, *(files.get(word, word) for word in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_report_needs_matplotlib(evaluated, tiny, text, tmp_path, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    status, out, err = evaluated(tiny, "--text", text, "--report", tmp_path / "x.html")
    assert (status, out) == (2, "")
    assert err == "error: --report needs matplotlib: pip install 'polysilicon[bench]'\n"


def test_another_backend_takes_over_no_option_of_the_model_s(evaluated, tiny, text):
    arguments = ("--text", text, "--against", tiny, "--against-with", "backend=reference")
    options = ("--kv-dtype", "f32", "--device", "0")
    status, out, err = evaluated(tiny, *arguments, "--json", options=options)
    assert status == 0, err
    found = json.loads(out)
    assert set(found["model"]["settings"]) == {"backend", "kv_dtype", "device"}
    assert set(found["reference"]["settings"]) == {"backend", "kv_dtype"}


def test_a_reference_is_not_quantised_with_the_model(evaluated, tiny, text):
    arguments = ("--text", text, "--against", tiny, "--json")
    status, out, err = evaluated(tiny, *arguments, options=("--quantize", "w4"))
    assert status == 0, err
    found = json.loads(out)
    assert found["model"]["settings"]["quantize"] == "w4"
    assert "quantize" not in found["reference"]["settings"]
    assert found["mean_kl"] > 0.001
