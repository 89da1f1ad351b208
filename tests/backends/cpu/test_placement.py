"""Where threads go, in made-up machines and containers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from polysilicon.backend import Dense
from polysilicon_cpu import library, placement
from polysilicon_cpu.device import CPUDevice
from polysilicon_cpu.options import Options


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cores(count: int, siblings: int) -> dict[str, str]:
    """`count` processors; those whose numbers are equal modulo count / siblings share a core."""
    return {
        f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list": ",".join(
            str(other) for other in range(cpu % (count // siblings), count, count // siblings)
        )
        + "\n"
        for cpu in range(count)
    }


def test_one_place_a_physical_core(tmp_path):
    root = machine(tmp_path, cores(8, 2))
    assert placement.places(root, range(8)) == (0, 1, 2, 3)


def test_siblings_of_processors_that_are_not_allowed_are_places(tmp_path):
    root = machine(tmp_path, cores(8, 2))
    assert placement.places(root, {1, 4, 5, 6}) == (1, 4, 6)


def test_without_topology_every_processor_is_a_place(tmp_path):
    assert placement.places(tmp_path, {3, 5}) == (3, 5)


@pytest.mark.parametrize("text", ["0-", "a,b", "0-1-2", ""])
def test_malformed_topology_is_left_aside(tmp_path, text):
    name = "sys/devices/system/cpu/cpu0/topology/core_cpus_list"
    root = machine(tmp_path, {name: text})
    assert placement.places(root, {0, 1}) == (0, 1)


def test_ranges_of_siblings(tmp_path):
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = machine(tmp_path, {name.format(0): "0-1", name.format(2): "2-3\n"})
    assert placement.places(root, range(4)) == (0, 2)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("max 100000", 4), ("200000 100000", 2), ("250000 100000", 2), ("50000 100000", 1),
     ("800000 100000", 4), ("garbage", 4), ("100000 0", 4)],
)  # fmt: skip
def test_the_quota_of_cgroup_v2(tmp_path, limit, expected):
    root = machine(
        tmp_path, {"proc/self/cgroup": "0::/pod/box\n", "sys/fs/cgroup/pod/box/cpu.max": limit}
    )
    assert placement.default_threads(range(4), root) == expected


def test_the_least_quota_on_the_way_up_counts(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/pod/box/cpu.max": "600000 100000",
            "sys/fs/cgroup/pod/cpu.max": "300000 100000",
        },
    )
    assert placement.quota(root) == 3
    assert placement.default_threads(range(8), root) == 3


def test_the_quota_of_cgroup_v1(tmp_path):
    root = machine(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/box\n2:memory:/elsewhere\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "150000\n",
            "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "50000\n",
        },
    )
    assert placement.quota(root) == 3


def test_no_quota_of_cgroup_v1(tmp_path):
    root = machine(
        tmp_path,
        {
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert placement.quota(root) is None


NODES = "sys/devices/system/node"
TWO_NODES = {
    f"{NODES}/online": "0-1\n",
    f"{NODES}/node0/cpulist": "0-3,8-11\n",
    f"{NODES}/node1/cpulist": "4-7,12-15\n",
}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [((0, 1), (0,)), ((5,), (1,)), ((3, 4), (0, 1)), ((0, 12), (0, 1)), ((99,), ())],
)
def test_nodes_of_the_places(tmp_path, chosen, expected):
    assert placement.nodes(chosen, machine(tmp_path, TWO_NODES)) == expected


def test_nodes_without_processors_are_left_out(tmp_path):
    root = machine(tmp_path, {**TWO_NODES, f"{NODES}/online": "0-2", f"{NODES}/node2/cpulist": ""})
    assert placement.nodes(range(16), root) == (0, 1)


@pytest.mark.parametrize("online", ["", "garbage", "0-1"])
def test_a_system_that_tells_of_no_nodes(tmp_path, online):
    root = machine(tmp_path, {f"{NODES}/online": online})
    assert placement.nodes((0, 1), root) == ()


@pytest.mark.parametrize(
    ("chosen", "numa"),
    [((0, 4), "memory spread over 2 NUMA nodes"), ((4, 5), "on NUMA node 1 of 2")],
)
def test_details_name_what_is_there(tmp_path, chosen, numa):
    root = machine(tmp_path, {**TWO_NODES, "sys/fs/cgroup/cpu.max": "150000 100000"})
    assert placement.details(chosen, root) == {
        "threads": "1 threads, 2 cores",
        "quota": "quota of 1.5 cores",
        "numa": numa,
    }


def test_one_node_is_not_worth_a_word(tmp_path):
    root = machine(tmp_path, {f"{NODES}/online": "0", f"{NODES}/node0/cpulist": "0-1"})
    assert placement.nodes((0, 1), root) == (0,)
    assert "numa" not in placement.details((0, 1), root)


@pytest.mark.parametrize(("nodes", "spread"), [((0, 1), 3), ((0,), 0)])
def test_the_device_is_told_to_spread_its_memory(monkeypatch, nodes, spread):
    """And computes all the same, whether or not the system has such nodes."""
    told = []
    native = library.load()

    class Spy:
        def __getattr__(self, name):
            return getattr(native, name)

        def ps_device_open(self, *arguments):
            told.append(arguments[-1])
            return native.ps_device_open(*arguments)

    monkeypatch.setattr(library, "load", Spy)
    monkeypatch.setattr(placement, "nodes", lambda places: nodes)
    device = CPUDevice(Options(threads=2))
    weight = Dense(array=np.ones((40, 70), np.float32))
    np.testing.assert_array_equal(device.put([weight]).values(), weight.array)
    device.close()
    assert told == [spread]


def test_this_machine_has_a_place():
    chosen = placement.places()
    assert chosen
    assert 1 <= placement.default_threads(chosen) <= len(chosen)
