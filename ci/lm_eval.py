"""lm-eval's `local-completions` against our server, and the same tasks through `polysilicon eval`.

    python ci/lm_eval.py MODEL --lm-eval-python VENV/bin/python

Runs lm-eval in each way in which it may ask, on tasks that are written here, and compares every
choice's log-probability and every text with what our own evals find. Ends with status 1 where they
differ. lm-eval lives in an environment of its own, made with

    pip install 'lm_eval[api]'

`--tokenizer DIRECTORY` adds the tokenizer of transformers, which that environment then needs too;
without it lm-eval asks the server for the tokens of its texts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.evals.answers import Outcome, run_tasks
from polysilicon.evals.tasks import parse_task
from polysilicon.testing.served import serving

CHOICES = (
    ("The capital of France is", (" Paris", " London", " Berlin", " Rome"), 0),
    ("Two plus two is", (" five", " four", " nine"), 1),
    ("Snow is", (" black", " white", " green"), 1),
    ("The opposite of hot is", (" cold", " warm"), 0),
    ("A dog says", (" meow", " woof"), 1),
    ("Water boils at", (" 100 degrees Celsius", " 3 degrees"), 0),
    ("The sun rises in the", (" west", " east"), 1),
    ("Grass is", (" green", " a kind of metal that was found in 1850"), 0),
)
MATCHES = (
    ("The capital of France is", " Paris"),
    ("1, 2, 3, 4,", " 5, 6, 7"),
    ("Monday, Tuesday,", " Wednesday"),
)
MAX_TOKENS = 8
NEAR = 0.05
"""By how much a choice's log-probability may differ: batches are rounded in their own ways."""

CHOICE_TASK = """\
task: polysilicon_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
MATCH_TASK = """\
task: polysilicon_match
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/match.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
generation_kwargs: {{until: ["\\n"], max_gen_toks: {max_tokens}}}
metric_list: [{{metric: exact_match}}]
"""
BOTH = ("polysilicon_choice", "polysilicon_match")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--lm-eval-python", required=True, help="of the environment that has it")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--tokenizer", type=Path, help="a directory that transformers reads")
    options = parser.parse_args()
    ways: list[tuple[str, str, Sequence[str], Sequence[str]]] = [
        ("the server's tokenizer", "tokenizer_backend=auto", [], BOTH),
        ("batches of 4", "tokenizer_backend=remote", ["--batch_size", "4"], BOTH),
        ("4 at once, as texts", "num_concurrent=4,tokenized_requests=False", [], BOTH),
        ("no tokenizer", "tokenizer_backend=None", [], BOTH[1:]),
    ]
    if options.tokenizer:
        tokenizer = f"tokenizer_backend=huggingface,tokenizer={options.tokenizer}"
        ways.append(("transformers' tokenizer", tokenizer, [], BOTH))
    ours = own_outcomes(options.model, options.backend)
    failed = False
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_tasks(folder)
        name = "served"
        arguments = ["--backend", options.backend, "--served-model-name", name]
        with serving(str(options.model), arguments) as server:
            for number, (way, settings, more, tasks) in enumerate(ways):
                settings = f"model={name},base_url={server.url}/v1/completions,{settings}"
                output = folder / str(number)
                samples = run(options.lm_eval_python, settings, more, tasks, folder, output)
                reasons = differences(samples, ours)
                failed |= bool(reasons)
                print(f"{way:24} {', '.join(reasons) or 'the same'}", flush=True)
    sys.exit(1 if failed else 0)


def write_tasks(folder: Path) -> None:
    choices = [{"context": c, "choices": list(o), "answer": a} for c, o, a in CHOICES]
    matches = [{"prompt": prompt, "answer": answer} for prompt, answer in MATCHES]
    for name, lines, task in (
        ("choice", choices, CHOICE_TASK),
        ("match", matches, MATCH_TASK),
    ):
        content = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(content)
        text = task.format(folder=folder, max_tokens=MAX_TOKENS)
        (folder / f"{name}.yaml").write_text(text)


def own_outcomes(model: Path, backend: str) -> dict[str, list[Outcome]]:
    """What our evals find, by lm-eval's names of the tasks."""
    choices = [
        parse_task({"context": c, "choices": list(o), "answer": a}, c) for c, o, a in CHOICES
    ]
    matches = [
        parse_task(
            {"prompt": prompt, "answer": answer, "max_tokens": MAX_TOKENS, "normalisation": "none"},
            prompt,
        )
        for prompt, answer in MATCHES
    ]
    loaded = load(Config(backend=backend), model)
    try:
        found = run_tasks(loaded, [*choices, *matches], lambda: None)
    finally:
        loaded.client.close()
        loaded.checkpoint.close()
    return dict(zip(BOTH, (found[: len(choices)], found[len(choices) :]), strict=True))


def run(
    python: str,
    settings: str,
    more: Sequence[str],
    tasks: Sequence[str],
    folder: Path,
    output: Path,
) -> dict[str, list[dict[str, Any]]]:
    """lm-eval's samples by task, in the order of the lines."""
    command = [
        python, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", settings,
        "--include_path", str(folder), "--tasks", ",".join(tasks), "--output_path", str(output),
        "--log_samples", *more,
    ]  # fmt: skip
    # Nothing is fetched, and nothing that an earlier run cached is taken for this one's.
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"lm-eval ended with status {done.returncode}:\n{done.stderr[-4000:]}")
    samples = {}
    for task in tasks:
        (path,) = output.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda line: line["doc_id"])
    return samples


def differences(
    samples: dict[str, list[dict[str, Any]]], ours: dict[str, list[Outcome]]
) -> list[str]:
    """Where lm-eval found something else than we did, in words."""
    reasons = []
    for task, lines in samples.items():
        for line, outcome in zip(lines, ours[task], strict=True):
            place = f"{task} {line['doc_id']}"
            if not outcome.scores:
                (text,) = line["resps"][0]
                if text != outcome.answer:
                    reasons.append(f"{place}: {text!r}, ours {outcome.answer!r}")
                continue
            theirs = [float(response[0][0]) for response in line["resps"]]
            worst = max(abs(a - b) for a, b in zip(theirs, outcome.scores, strict=True))
            if worst > NEAR:
                reasons.append(f"{place}: a log-probability differs by {worst:.3g}")
            if (line["acc"], line["acc_norm"]) != (outcome.correct, outcome.correct_by_length):
                reasons.append(f"{place}: right or wrong")
    return reasons


if __name__ == "__main__":
    main()
