"""Perplexity and divergence of tiny models against a float64 forward and the formulas."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import scipy.special

from polysilicon.backend import DeviceLost
from polysilicon.config import Config
from polysilicon.engine.loading import load
from polysilicon.engine.model_executor import ModelExecutor
from polysilicon.evals import text as text_module
from polysilicon.evals.text import compare_text, score_text, windows_of
from polysilicon.evals.windows import Cut

NEAR = 1e-4
"""By how much float32 may miss a log-probability of float64."""


def expected(models, windows, width=None):
    """Log-probabilities [n, V] of windows' scored tokens by each model, and the tokens."""
    rows = [[] for _ in models]
    targets = []
    for window in windows:
        targets += window.scored
        for of_model, model in zip(rows, models, strict=True):
            logits = model.logits(window.tokens, kv_dtype="f32")[window.first - 1 : -1, :width]
            of_model.append(scipy.special.log_softmax(logits, axis=1))
    return [np.concatenate(of_model) for of_model in rows], np.array(targets)


@pytest.fixture
def windows(made, text):
    """The text's windows by a cut."""

    def cut_up(*, bos=False, **cut):
        ids = made.ids_of(text.read_text())
        return list(Cut(**cut).windows(ids, [made.bos] if bos else []))

    return cut_up


@pytest.mark.parametrize(
    ("arguments", "cut"),
    [
        ([], {}),
        (["--context", "40", "--stride", "7"], {"context": 40, "stride": 7}),
        (
            ["--context", "33", "--convention", "llamacpp"],
            {"context": 33, "convention": "llamacpp"},
        ),
        (["--context", "20", "--max-sequences", "3"], {"context": 20}),
        (["--context", "300", "--step-tokens", "5"], {"context": 300}),
    ],
)
def test_perplexity_is_that_of_the_formula(evaluated, tiny, text, made, windows, arguments, cut):
    status, out, err = evaluated(tiny, "--text", text, "--json", *arguments)
    assert status == 0, err
    found = json.loads(out)
    of_text = windows(**cut)
    (rows,), targets = expected([made.llama], of_text)
    costs = -rows[np.arange(len(targets)), targets]
    assert found["scored_tokens"] == len(costs)
    assert found["windows"] == len(of_text)
    assert found["mean_cost"] == pytest.approx(costs.mean(), abs=NEAR)
    assert found["perplexity"] == pytest.approx(np.exp(costs.mean()), rel=NEAR)
    error = costs.std(ddof=1) / len(costs) ** 0.5
    assert found["perplexity_stderr"] == pytest.approx(np.exp(costs.mean()) * error, rel=1e-3)
    assert found["reference"] is None


def test_bos_stands_before_every_window(evaluated, with_bos, text, made, windows):
    status, out, _ = evaluated(with_bos, "--text", text, "--json", "--context", 30)
    assert status == 0
    found = json.loads(out)
    assert "<|im_start|> before each" in found["how"]
    assert found["scored_tokens"] == 300
    (rows,), targets = expected([made.llama], windows(bos=True, context=30))
    costs = -rows[np.arange(len(targets)), targets]
    assert found["perplexity"] == pytest.approx(np.exp(costs.mean()), rel=NEAR)


@pytest.mark.parametrize(
    ("arguments", "cut"),
    [
        (["--context", "50", "--stride", "30"], {"context": 50, "stride": 30}),
        (
            ["--context", "60", "--convention", "llamacpp", "--against-with", "step-tokens=7"],
            {"context": 60, "convention": "llamacpp"},
        ),
        # More than one step scores, and the two cut it up differently.
        (
            ["--context", "300", "--stride", "300", "--against-with", "step-tokens=50"],
            {"context": 300, "stride": 300},
        ),
    ],
)
def test_divergence_is_that_of_the_formula(
    evaluated, tiny, coarse, text, made, windows, arguments, cut
):
    status, out, err = evaluated(coarse, "--text", text, "--against", tiny, "--json", *arguments)
    assert status == 0, err
    found = json.loads(out)
    (ours, theirs), targets = expected([made.disturbed, made.llama], windows(**cut))
    check(found, ours, theirs, targets)


def check(found, ours, theirs, targets):
    at = np.arange(len(targets))
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    difference = ours[at, targets] - theirs[at, targets]
    change = np.exp(ours[at, targets]) - np.exp(theirs[at, targets])
    # The models differ enough for the bounds below to mean something.
    assert divergence.mean() > 100 * NEAR
    assert found["scored_tokens"] == len(targets)
    assert found["mean_kl"] == pytest.approx(divergence.mean(), abs=NEAR)
    assert found["kl_p50"] == pytest.approx(np.median(divergence), abs=NEAR)
    assert found["kl_p99"] == pytest.approx(np.quantile(divergence, 0.99), abs=NEAR)
    assert found["kl_max"] == pytest.approx(divergence.max(), abs=NEAR)
    assert found["mean_delta"] == pytest.approx(np.abs(difference).mean(), abs=NEAR)
    assert found["delta_p95"] == pytest.approx(np.quantile(np.abs(difference), 0.95), abs=NEAR)
    assert found["mean_probability_change"] == pytest.approx(change.mean(), abs=NEAR)
    assert found["rms_probability_change"] == pytest.approx((change**2).mean() ** 0.5, abs=NEAR)
    ratio = np.exp(-difference.mean())
    assert found["perplexity_ratio"] == pytest.approx(ratio, rel=NEAR)
    assert found["perplexity"] / found["reference_perplexity"] == pytest.approx(ratio, rel=NEAR)
    error = difference.std(ddof=1) / len(difference) ** 0.5
    assert found["perplexity_ratio_stderr"] == pytest.approx(ratio * error, rel=1e-2)
    # Where two tokens are nearly tied, either may be the likeliest.
    sure = np.ones(len(targets), bool)
    for rows in (ours, theirs):
        best = np.sort(rows, axis=1)
        sure &= best[:, -1] - best[:, -2] > NEAR
    same = ours.argmax(axis=1) == theirs.argmax(axis=1)
    assert 0 < same[sure].sum() < sure.sum()
    unsure = (~sure).mean()
    assert found["agreement"] == pytest.approx((same & sure).mean(), abs=unsure + 1e-12)


def test_a_model_does_not_diverge_from_itself(evaluated, tiny, text):
    arguments = ("--text", text, "--against", tiny, "--context", 64, "--json")
    status, out, _ = evaluated(tiny, *arguments)
    assert status == 0
    found = json.loads(out)
    assert found["mean_kl"] == found["kl_max"] == found["mean_delta"] == 0
    assert found["agreement"] == found["perplexity_ratio"] == 1
    assert found["impossible_tokens"] == 0


def test_options_of_the_reference_tell_one_model_from_itself(evaluated, tiny, text):
    arguments = ("--text", text, "--against", tiny, "--against-with", "kv-dtype=int8", "--json")
    status, out, _ = evaluated(tiny, *arguments, options=["--kv-dtype", "f32"])
    assert status == 0
    found = json.loads(out)
    assert found["model"]["settings"]["kv_dtype"] == "f32"
    assert found["reference"]["settings"]["kv_dtype"] == "int8"
    assert found["reference"]["backend"] == "reference"
    assert 0 < found["mean_kl"] < 0.05


@pytest.mark.parametrize("swapped", [False, True])
def test_vocabularies_of_two_widths_are_compared_where_both_have_ids(
    evaluated, tiny, wide, text, made, windows, swapped
):
    pair = (tiny, wide) if swapped else (wide, tiny)
    arguments = (pair[0], "--text", text, "--against", pair[1], "--context", 64, "--json")
    status, out, err = evaluated(*arguments)
    assert status == 0, err
    models = [made.llama, made.widened]
    rows, targets = expected(models if swapped else models[::-1], windows(context=64), 211)
    found = json.loads(out)
    assert found["vocabulary"] == 211
    check(found, *rows, targets)


class WholeModel:
    """An executor that keeps its logits to itself, as whole-model executors do."""

    def __init__(self, executor):
        self.step, self.close = executor.step, executor.close
        self.vocab_size, self.max_sequences = executor.vocab_size, executor.max_sequences
        self.serves_adapters = False


def test_a_whole_model_executor_tells_as_much(tiny, coarse, text):
    config = Config(backend="reference", kv_dtype="f32", max_sequences=1)
    found = []
    for whole in (False, True):
        model, reference = load(config, coarse), load(config, tiny)
        if whole:
            model.engine.executor = WholeModel(model.engine.executor)
        of_text = windows_of(model, text.read_text(), Cut(context=80))
        found.append(compare_text(model, reference, of_text, lambda: None).comparison)
        for loaded in (model, reference):
            loaded.client.close()
    plain, whole = found
    np.testing.assert_allclose(whole.divergence, plain.divergence, atol=1e-5)
    np.testing.assert_allclose(whole.logprob, plain.logprob, atol=1e-5)
    assert (whole.same_top == plain.same_top).all()


def test_scores_come_in_the_text_s_order(tiny, text, made):
    """Windows end in another order than they began in: the last is the shortest."""
    loaded = load(Config(backend="reference", kv_dtype="f32"), tiny)
    of_text = windows_of(loaded, text.read_text(), Cut(context=90, stride=41))
    assert len(of_text[-1].tokens) < len(of_text[0].tokens)
    done = []
    scores = score_text(loaded, of_text, lambda: done.append(1))
    loaded.client.close()
    assert len(done) == len(of_text) == scores.windows
    assert list(scores.tokens) == made.ids_of(text.read_text())[1:]
    (rows,), targets = expected([made.llama], of_text)
    np.testing.assert_allclose(scores.logprobs, rows[np.arange(len(targets)), targets], atol=NEAR)
    assert list(scores.places[:3]) == [1, 2, 3]
    assert scores.places[-1] == len(of_text[-1].tokens) - 1


@pytest.mark.parametrize("compared", [False, True])
def test_a_model_that_gives_no_numbers_keeps_no_threshold(evaluated, tiny, broken, text, compared):
    other = ("--against", tiny) if compared else ()
    arguments = ("--text", text, *other, "--max-perplexity", 1e9)
    status, out, err = evaluated(broken, *arguments, "--json")
    assert status == 1
    assert err.splitlines()[-1] == "error: perplexity is inf, above --max-perplexity 1e+09"
    found = json.loads(out)
    assert found["impossible_tokens"] == found["scored_tokens"] == 299
    assert found["perplexity"] is None
    if compared:
        assert found["mean_kl"] is found["kl_p50"] is found["mean_delta"] is None
        assert found["reference_perplexity"] > 1
    status, out, _ = evaluated(broken, *arguments)
    assert re.search(r"of no probability +299\b", out)
    assert re.search(r"Perplexity +inf\b", out)


@pytest.mark.parametrize("content", [b"", b" \n\t\n"])
def test_an_empty_text_is_refused(evaluated, tiny, tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    assert evaluated(tiny, "--text", path) == (2, "", f"error: {path} holds no text\n")


def test_a_text_that_is_no_utf_8_is_refused(evaluated, tiny, tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"abc\xe9d")
    status, out, err = evaluated(tiny, "--text", path)
    assert (status, out) == (2, "")
    assert "is not UTF-8 at byte 3: convert it" in err


def test_a_text_that_is_not_there_or_too_large_is_refused(
    evaluated, tiny, text, tmp_path, monkeypatch
):
    status, _, err = evaluated(tiny, "--text", tmp_path / "none.txt")
    assert status == 2
    assert "none.txt cannot be read: No such file" in err
    status, _, err = evaluated(tiny, "--text", tmp_path)
    assert status == 2
    assert "cannot be read" in err
    monkeypatch.setattr(text_module, "MAX_TEXT", 299)
    status, _, err = evaluated(tiny, "--text", text)
    assert status == 2
    assert "take a part of it" in err


def test_one_token_is_scored_behind_bos_only(evaluated, tiny, with_bos, made, tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("q")
    status, _, err = evaluated(tiny, "--text", path)
    assert status == 2
    assert "the text has 1 token(s), of which none can be scored" in err
    status, out, _ = evaluated(with_bos, "--text", path, "--json")
    assert status == 0
    found = json.loads(out)
    (token,) = made.ids_of("q")
    (row,) = scipy.special.log_softmax(made.llama.logits([made.bos], kv_dtype="f32"), axis=1)
    assert found["mean_cost"] == pytest.approx(-row[token], abs=NEAR)
    assert found["scored_tokens"] == 1
    assert found["perplexity_stderr"] is None


def test_windows_past_the_model_s_context_are_refused(evaluated, tiny, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("ab" * 400)
    status, _, err = evaluated(tiny, "--text", path, "--context", 600)
    assert status == 2
    assert "windows of 600 tokens do not fit into the context of 512: lower --context" in err


def test_a_reference_with_another_tokenizer_is_refused(evaluated, tiny, with_bos, text):
    status, _, err = evaluated(tiny, "--text", text, "--against", with_bos)
    assert status == 2
    assert "cut the text into different tokens: a reference needs the same tokenizer" in err


@pytest.mark.parametrize("compared", [False, True])
def test_a_lost_device_is_one_error(evaluated, tiny, text, monkeypatch, compared):
    def lost(*_):
        raise DeviceLost("the cable was pulled")

    monkeypatch.setattr(ModelExecutor, "logits" if compared else "step", lost)
    against = ("--against", tiny) if compared else ()
    status, out, err = evaluated(tiny, "--text", text, *against)
    assert (status, out) == (1, "")
    assert "the device failed: the cable was pulled" in err.splitlines()[-1]
