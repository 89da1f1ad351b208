"""Tasks answered by tiny models, against sums of float64 log-probabilities."""

from __future__ import annotations

import json

import numpy as np
import pytest
import scipy.special

from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.evals.answers import Outcome, run_tasks, task_figures
from polysilicon.evals.tasks import parse_task


def choice_lines(count: int) -> list[dict]:
    """Questions with two to four choices of up to eight letters."""
    rng = np.random.default_rng(21)

    def word(most: int) -> str:
        return "".join(rng.choice(list("abcdef "), rng.integers(1, most + 1)))

    lines = []
    while len(lines) < count:
        choices = [word(8) for _ in range(rng.integers(2, 5))]
        if len(set(choices)) == len(choices):
            answer = int(rng.integers(len(choices)))
            lines.append({"context": word(20), "choices": choices, "answer": answer})
    return lines


@pytest.fixture
def sums(made):
    """The log-probabilities of a line's choices, in float64."""

    def of_line(model, line, beginning=()):
        found = []
        for choice in line["choices"]:
            ids = [*beginning, *made.ids_of(line["context"] + choice)]
            rows = scipy.special.log_softmax(model.logits(ids, kv_dtype="f32"), axis=1)
            places = np.arange(len(ids) - len(choice), len(ids))
            found.append(rows[places - 1, np.array(ids)[places]].sum())
        return np.array(found)

    return of_line


@pytest.fixture
def tasks(tmp_path):
    """Writes lines of tasks; the file."""

    def write(*lines):
        path = tmp_path / "tasks.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    return write


def answered(model, lines):
    loaded = load(Config(backend="reference", kv_dtype="f32"), model)
    done = []
    parsed = [parse_task(line, f"line {index}") for index, line in enumerate(lines)]
    outcomes = run_tasks(loaded, parsed, lambda: done.append(1))
    loaded.client.close()
    assert len(done) == len(outcomes) == len(lines)
    return outcomes


@pytest.mark.parametrize("bos", [False, True])
def test_choices_are_scored_by_their_log_probabilities(tiny, with_bos, made, sums, bos):
    lines = choice_lines(30)
    outcomes = answered(with_bos if bos else tiny, lines)
    for line, outcome in zip(lines, outcomes, strict=True):
        expected = sums(made.llama, line, (made.bos,) if bos else ())
        assert outcome.scores == pytest.approx(expected, abs=1e-3)
        by_length = expected / [len(choice) for choice in line["choices"]]
        for scores in (expected, by_length):
            # No near tie, or the outcome below would be chance.
            assert np.diff(np.sort(scores))[-1] > 1e-3
        assert outcome.answer == line["choices"][expected.argmax()]
        assert outcome.correct == (expected.argmax() == line["answer"])
        assert outcome.correct_by_length == (by_length.argmax() == line["answer"])
    assert {outcome.correct for outcome in outcomes} == {True, False}
    assert any(outcome.correct != outcome.correct_by_length for outcome in outcomes)


def greedy(model, ids, count):
    ids = list(ids)
    for _ in range(count):
        ids.append(int(model.logits(ids, kv_dtype="f32")[-1].argmax()))
    return ids[len(ids) - count :]


def test_texts_are_generated_greedily_and_compared(tiny, made):
    loaded = load(Config(backend="reference", kv_dtype="f32"), tiny)
    said = loaded.tokenizer.decode(greedy(made.llama, made.ids_of("abc"), 6))
    loaded.client.close()
    line = {"prompt": "abc", "max_tokens": 6, "stop": [], "normalisation": "none"}
    outcomes = answered(
        tiny,
        [
            {**line, "answer": said},
            {**line, "answer": said + "x"},
            {**line, "answers": ["x", said]},
            {**line, "answer": said[:3], "max_tokens": 3},
            {**line, "answer": said[:2], "stop": said[2]},
            {**line, "answer": f" {said}\n", "normalisation": "strip"},
        ],
    )
    assert [outcome.correct for outcome in outcomes] == [True, False, True, True, True, True]
    assert outcomes[0].answer == said
    assert outcomes[0].correct_by_length is None


def test_of_equal_choices_the_first_is_taken(evaluated, tiny, tasks):
    lines = [{"context": "ab", "choices": ["c", "c"], "answer": index} for index in (0, 1)]
    status, out, _ = evaluated(tiny, "--tasks", tasks(*lines), "--json", "--max-sequences", 1)
    assert status == 0
    found = json.loads(out)
    assert found["accuracy"] == found["choice_accuracy_by_length"] == 0.5


def test_a_model_without_any_probability_is_right_about_no_choice(evaluated, broken, tasks):
    lines = [{"context": "ab", "choices": ["c", "d"], "answer": index} for index in (0, 1)]
    status, out, _ = evaluated(broken, "--tasks", tasks(*lines), "--json")
    assert status == 0
    found = json.loads(out)
    assert found["accuracy"] == found["choice_accuracy_by_length"] == 0


def test_figures_are_means_with_their_errors(evaluated, tiny, tasks, made, sums):
    lines = choice_lines(9)
    right = [int(sums(made.llama, line).argmax()) == line["answer"] for line in lines]
    lines.append({"prompt": "abc", "answer": "no such thing", "max_tokens": 2})
    status, out, _ = evaluated(tiny, "--tasks", tasks(*lines), "--json")
    assert status == 0
    found = json.loads(out)
    share = sum(right) / 9
    assert found["tasks"] == 10
    assert found["choice_accuracy"] == pytest.approx(share)
    assert found["choice_accuracy_stderr"] == pytest.approx((share * (1 - share) / 8) ** 0.5)
    assert found["accuracy"] == pytest.approx(sum(right) / 10)
    assert (found["match_accuracy"], found["match_accuracy_stderr"]) == (0, None)


def test_a_reference_answers_the_same_tasks(evaluated, tiny, coarse, tasks, made, sums):
    lines = choice_lines(40)
    status, out, _ = evaluated(coarse, "--tasks", tasks(*lines), "--against", tiny, "--json")
    assert status == 0
    found = json.loads(out)
    ours, theirs = (
        np.array([sums(model, line).argmax() for line in lines])
        for model in (made.disturbed, made.llama)
    )
    answers = np.array([line["answer"] for line in lines])
    assert found["accuracy"] == pytest.approx((ours == answers).mean())
    assert found["reference_accuracy"] == pytest.approx((theirs == answers).mean())
    assert found["agreement"] == pytest.approx((ours == theirs).mean())
    assert 0.5 < found["agreement"] < 1
    difference = (ours == answers).astype(float) - (theirs == answers)
    assert found["accuracy_difference"] == pytest.approx(difference.mean())
    error = difference.std(ddof=1) / len(lines) ** 0.5
    assert found["accuracy_difference_stderr"] == pytest.approx(error)


def test_only_kinds_that_there_are_have_figures():
    outcomes = [Outcome(answer="a", correct=True)]
    assert task_figures(outcomes) == {
        "tasks": 1,
        "accuracy": 1.0,
        "accuracy_stderr": None,
        "match_accuracy": 1.0,
        "match_accuracy_stderr": None,
    }


def test_a_task_past_the_context_names_its_line(evaluated, tiny, tasks):
    good = {"context": "a", "choices": ["b", "c"], "answer": 0}
    path = tasks(good, {**good, "context": "a" * 512})
    status, out, err = evaluated(tiny, "--tasks", path)
    assert (status, out) == (1, "")
    assert f"{path}, line 2: the prompt has 513 tokens" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no tasks: write one JSON object a line"),
        (b"\n\n", "holds no tasks: write one JSON object a line"),
        (b'{"context": "a"}\n', 'line 1: needs one of "choices", "answer"'),
        (b'\n{"context": "a"\n', "line 2 is not JSON"),
        (b'\n\n["a"]\n', "line 3: write one JSON object a line"),
        (b'{"context": "a\xff"}\n', "line 1 is not JSON"),
    ],
)
def test_a_wrong_file_names_the_line(evaluated, tmp_path, content, message):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    # Before any model is looked for.
    status, out, err = evaluated("no-such-model", "--tasks", path)
    assert (status, out) == (2, "")
    assert message in err
