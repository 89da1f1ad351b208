"""Tuning tables: what is chosen, and what is refused in a table's file."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polysilicon_torch.specialisation import OPTIONS
from polysilicon_torch.target import TARGETS
from polysilicon_torch.tuning import (
    MAX_FILE_BYTES,
    Rule,
    Tuning,
    TuningError,
    card_path,
    parse_table,
    read_card,
    read_table,
    read_tables,
    shared_table,
    write_card,
)

HOPPER = TARGETS["sm_90"]
BASE = parse_table(
    {
        "any": {
            "product": [
                {"when": {"rows": [1, 16]}, "use": {"BLOCK_N": 64, "num_warps": 4}},
                {"when": {"rows": [None, 64], "columns": [4096, None]}, "use": {"BLOCK_N": 32}},
                {"when": {}, "use": {"BLOCK_N": 128, "num_warps": 8}},
            ]
        }
    }
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"rows": 1}, {"BLOCK_N": 64, "num_warps": 4}),
        ({"rows": 16}, {"BLOCK_N": 64, "num_warps": 4}),
        ({"rows": 17}, {"BLOCK_N": 128, "num_warps": 8}),
        ({"rows": 17, "columns": 4095}, {"BLOCK_N": 128, "num_warps": 8}),
        ({"rows": 64, "columns": 4096}, {"BLOCK_N": 32}),
        ({"rows": 0, "columns": 1 << 40}, {"BLOCK_N": 32}),
    ],
)
def test_the_first_rule_that_fits(shape, expected):
    assert Tuning(HOPPER, (BASE,)).pick("product", **shape) == expected


def test_sections_and_tables_lie_over_one_another():
    vendor = parse_table(
        {
            "sm_90": {"product": [{"when": {"rows": [1, 1]}, "use": {"num_warps": 1}}]},
            "hopper": {"product": [{"when": {}, "use": {"num_warps": 2, "num_stages": 3}}]},
            "ampere": {"product": [{"when": {}, "use": {"num_warps": 16}}]},
        }
    )
    tuning = Tuning(HOPPER, (BASE, vendor))
    assert tuning.pick("product", rows=1) == {"BLOCK_N": 64, "num_warps": 1, "num_stages": 3}
    assert tuning.pick("product", rows=2) == {"BLOCK_N": 64, "num_warps": 2, "num_stages": 3}
    ampere = Tuning(TARGETS["sm_80"], (BASE, vendor))
    assert ampere.pick("product", rows=2) == {"BLOCK_N": 64, "num_warps": 16}
    tried = tuning.over("product", {"BLOCK_N": 256})
    assert tried.pick("product", rows=1) == {"BLOCK_N": 256, "num_warps": 1, "num_stages": 3}


def test_a_kernel_that_no_table_knows():
    with pytest.raises(TuningError, match="no tuning table has a rule for kernel other"):
        Tuning(HOPPER, (BASE,)).pick("other", rows=1)


def test_a_card_keeps_what_was_measured():
    rules = {"product": [Rule(when={"rows": (1, 4)}, use={"BLOCK_N": 16, "num_warps": 2})]}
    assert read_card("NVIDIA H200", HOPPER, [BASE]) == {}
    path = write_card("NVIDIA H200", HOPPER, rules)
    assert path.name == "sm_90-nvidia-h200.json"
    table = read_card("NVIDIA H200", HOPPER, [BASE])
    assert table == {"sm_90": rules}
    assert Tuning(HOPPER, (BASE, table)).pick("product", rows=4)["BLOCK_N"] == 16
    assert read_card("NVIDIA H100", HOPPER, [BASE]) == {}
    write_card("NVIDIA H200", HOPPER, {})
    assert read_card("NVIDIA H200", HOPPER, [BASE]) == {"sm_90": {}}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("card", ["../../etc/passwd", "", "a/b\0c", "x" * 5000, "Ünï"])
def test_a_card_may_be_called_anything(card, tmp_path):
    path = card_path(card, HOPPER)
    assert path.parent == tmp_path / "polysilicon" / "tuning"
    assert len(path.name) < 100


def test_a_user_without_a_home_has_no_card_table(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "~nobody-of-that-name/caches")
    assert read_card("card", HOPPER, [BASE]) == {}
    with pytest.raises(TuningError, match="set XDG_CACHE_HOME"):
        write_card("card", HOPPER, {})


def test_a_card_table_names_only_known_kernels_and_keys():
    for rules in (
        {"product": [Rule(when={}, use={"BLOCK_M": 16})]},
        {"other": [Rule(when={}, use={"BLOCK_N": 16})]},
    ):
        write_card("card", HOPPER, rules)
        with pytest.raises(TuningError, match=r"of a kernel .*: written by another version"):
            read_card("card", HOPPER, [BASE])


def one_rule(**changes):
    return {"any": {"k": [{"when": {}, "use": {"BLOCK": 16}} | changes]}}


@pytest.mark.parametrize(
    "value",
    [
        [],
        None,
        {"any": []},
        {"any": {"k": {}}},
        {"any": {"k": [1]}},
        {"any": {"k": [{"when": {}}]}},
        {"any": {"k e": []}},
        {"": {}},
        one_rule(more=1),
        one_rule(use={"BLOCK": "16"}),
        one_rule(use={"BLOCK": True}),
        one_rule(use={"BLOCK": 16.0}),
        one_rule(use={"BLOCK": 24}),
        one_rule(use={"BLOCK": 0}),
        one_rule(use={"BLOCK": 1 << 21}),
        one_rule(use={"SPLITS": -1}),
        one_rule(use={"num_warps": 3}),
        one_rule(use={"num_warps": 64}),
        one_rule(use={"num_stages": 0}),
        one_rule(use={"kpack": 4}),
        one_rule(when={"rows": 1}),
        one_rule(when={"rows": [1]}),
        one_rule(when={"rows": [1, 2.5]}),
        one_rule(when={"rows": [False, 1]}),
        {"any": {"k": [{"when": {}, "use": {}}] * 1001}},
    ],
)
def test_malformed_tables(value, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(json.dumps(value))
    with pytest.raises(TuningError, match=r"table\.json: .*: remove it"):
        read_table(path)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"a": NaN}', b" " * (MAX_FILE_BYTES + 1)],
    ids=["empty", "cut", "binary", "deep", "nan", "large"],
)
def test_files_that_are_no_table(data, tmp_path):
    path = tmp_path / "table.json"
    path.write_bytes(data)
    with pytest.raises(TuningError, match="remove it"):
        read_table(path)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["any", "k", "when", "use", "rows", "BLOCK"]), inner)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_a_table_or_is_refused(value):
    try:
        table = parse_table(value)
    except ValueError:
        return
    rules = [rule for kernels in table.values() for listed in kernels.values() for rule in listed]
    assert all(isinstance(number, int) for rule in rules for number in rule.use.values())


def test_two_files_cannot_rule_the_same_kernel(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(one_rule()))
    (tmp_path / "b.json").write_text(json.dumps({"hopper": {"k": []}, "any": {"l": []}}))
    assert set(read_tables(tmp_path)["any"]) == {"k", "l"}
    (tmp_path / "c.json").write_text(json.dumps({"any": {"l": []}}))
    with pytest.raises(TuningError, match=r"c\.json: another file has rules of l too"):
        read_tables(tmp_path)


def test_a_folder_that_cannot_be_read_or_written(tmp_path, monkeypatch):
    with pytest.raises(TuningError, match="cannot be read"):
        read_table(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TuningError, match="cannot be written"):
        write_card("card", HOPPER, {})


@pytest.mark.parametrize(("vendor", "kind"), [("cuda", "cuda"), ("rocm", "hip")])
def test_the_tables_of_this_distribution(vendor, kind):
    """A vendor's table has sections of its architectures, and changes what the shared one has."""
    table = pytest.importorskip(f"polysilicon_{vendor}.tables").table()
    targets = [target for target in TARGETS.values() if target.kind == kind]
    sections = {name for target in targets for name in (target.name, target.family)}
    assert table.keys() <= sections | {"any"}
    known = {}
    for kernel, rules in shared_table()["any"].items():
        assert rules[-1].when == {}, f"{kernel} has no rule for what is left"
        known[kernel] = set().union(*(rule.use for rule in rules))
    for kernels in table.values():
        for kernel, rules in kernels.items():
            assert set().union(*(rule.use for rule in rules)) <= known[kernel] | OPTIONS
