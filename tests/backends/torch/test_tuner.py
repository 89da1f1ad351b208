"""The tuner: its search, what it keeps, and that its trials launch the kernels that they name."""

import json
import math
from pathlib import Path

import pytest
import torch

from polysilicon.backend import DeviceError
from polysilicon_torch import trials, tuner
from polysilicon_torch.host import HostBackend
from polysilicon_torch.presence import CUDA
from polysilicon_torch.runtime import HostRuntime
from polysilicon_torch.target import INTERPRETER, TARGETS
from polysilicon_torch.trials import Sizes, Trial
from polysilicon_torch.tuner import descend, tune
from polysilicon_torch.tuning import Tuning, parse_table, read_card

TINY = Sizes(
    outputs=32,
    inputs=256,
    rows=(1, 3),
    sequences=2,
    context=40,
    heads=4,
    key_heads=2,
    dims=(64,),
    cache=1,
)
TABLE = parse_table(
    {"any": {"k": [{"when": {}, "use": {"BLOCK": 64, "num_warps": 4, "num_stages": 2}}]}}
)
SPACE = {"BLOCK": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8)}


def cost(choice):
    """Least at BLOCK 16 and num_warps 2; 128 does not run."""
    if choice["BLOCK"] == 128:
        return math.inf
    return choice["BLOCK"] + 10 * abs(choice["num_warps"] - 2)


def test_descend_finds_the_least():
    start = {"BLOCK": 64, "num_warps": 4, "num_stages": 2}
    read = []
    before, (best, after) = descend(
        start, SPACE, lambda c: read.append(tuple(c.items())) or cost(c)
    )
    assert (before, after) == (84, 16)
    assert best == {"BLOCK": 16, "num_warps": 2, "num_stages": 2}
    assert len(set(read)) == len(read)


def test_small_gains_are_no_gains():
    start = {"BLOCK": 64, "num_warps": 4}
    _, (best, _) = descend(start, SPACE, lambda c: 100 - 0.01 * c["BLOCK"])
    assert best == start


def test_a_start_that_does_not_run_ends_the_search():
    before, (best, after) = descend({"BLOCK": 128, "num_warps": 4}, SPACE, cost)
    assert math.isinf(before)
    assert math.isinf(after)
    assert best["BLOCK"] == 128


def test_the_search_is_bounded():
    space = {f"BLOCK_{index}": (16, 32, 64, 128) for index in range(12)}
    read = []

    def seconds(choice):
        read.append(choice)
        return 1.0

    descend(dict.fromkeys(space, 16), space, seconds)
    assert len(read) <= tuner._MOST_READINGS


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Trials take what `cost` says."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        tuner, "_seconds", lambda runtime, trial, tuning, choice: trial.launches[0](choice)
    )


def test_what_is_fastest_is_kept_for_the_card(timed):
    tuning = Tuning(TARGETS["sm_90"], (TABLE,))
    trial = Trial(
        kernel="k", shape={"rows": 4}, when={"rows": (1, 8)}, space=SPACE, launches=[cost]
    )
    same = Trial(
        kernel="k",
        shape={"rows": 40},
        when={"rows": (9, math.inf)},
        space={"num_stages": (1, 2, 3)},
        launches=[lambda choice: 1.0],
    )
    lines = []
    path = tune(HostRuntime(), tuning, "A card", [trial, same], lines.append)
    assert path.endswith("sm_90-a-card.json")
    assert json.loads(Path(path).read_text()) == {
        "sm_90": {
            "k": [
                {
                    "when": {"rows": [1, 8]},
                    "use": {"BLOCK": 16, "num_warps": 2, "num_stages": 2},
                },
                {
                    "when": {"rows": [9, None]},
                    "use": {"BLOCK": 64, "num_warps": 4, "num_stages": 2},
                },
            ]
        }
    }
    assert len(lines) == 2
    assert "'BLOCK': 16" in lines[0]
    assert "the same" in lines[1]
    own = read_card("A card", tuning.target, [TABLE])
    assert Tuning(tuning.target, (TABLE, own)).pick("k", rows=8)["BLOCK"] == 16
    assert Tuning(tuning.target, (TABLE, own)).pick("k", rows=9)["BLOCK"] == 64


def test_a_folder_that_cannot_be_written_is_an_error(timed, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    trial = Trial(kernel="k", shape={}, when={}, space=SPACE, launches=[cost])
    with pytest.raises(DeviceError, match="cannot be written"):
        tune(HostRuntime(), Tuning(TARGETS["sm_90"], (TABLE,)), "card", [trial], lambda line: None)


def test_a_table_that_does_not_run_is_an_error(timed):
    tuning = Tuning(TARGETS["sm_90"], (TABLE,))
    trial = Trial(kernel="k", shape={}, when={}, space=SPACE, launches=[lambda choice: math.inf])
    with pytest.raises(DeviceError, match="k does not run with"):
        tune(HostRuntime(), tuning, "card", [trial], lambda line: None)


def test_the_host_has_nothing_to_tune():
    device = HostBackend(CUDA, "polysilicon_cuda", ("sm_90",)).open(0, {})
    assert device.tune(lambda line: pytest.fail(line)) is None
    device.close()


def test_every_trial_launches_the_kernel_it_names():
    """What a launch asks the tables for is the trial's kernel, at numbers of the class that its
    choice is kept for."""
    tuning = Tuning.of(INTERPRETER)
    found = list(trials.trials(HostRuntime(), torch.float32, INTERPRETER, TINY))
    assert {trial.kernel for trial in found} == {
        "packed_product", "attention_decode", "attention_prefill",
    }  # fmt: skip
    for trial in found:
        asked = []

        class Watched(Tuning):
            def pick(self, kernel, /, **shape):
                asked.append((kernel, shape))  # noqa: B023
                return super().pick(kernel, **shape)

        choice = tuning.pick(trial.kernel, **trial.shape)
        tables = tuning.over(trial.kernel, choice).tables
        result = trial.launches[0](Watched(INTERPRETER, tables))
        assert torch.isfinite(result).all()
        shapes = [shape for kernel, shape in asked if kernel == trial.kernel]
        assert shapes
        for shape in shapes:
            assert all(low <= shape[name] <= high for name, (low, high) in trial.when.items())
            assert trial.shape.items() <= shape.items()
