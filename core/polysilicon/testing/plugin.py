"""The pytest plugin of the conformance kit: flags and settings only.

Every pytest run in an environment with polysilicon loads this module, so it imports nothing but
pytest. The kit's tests, fixtures and oracles stand in `polysilicon.testing.conformance`:

    pytest --pyargs polysilicon.testing.conformance --polysilicon-backend NAME
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("polysilicon.testing")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polysilicon", "polysilicon conformance kit")
    group.addoption(
        "--polysilicon-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="backend to judge: the name of an installed one, or MODULE:NAME for one that a module "
        "supplies as a plugin would. May be repeated. Default: the setting polysilicon_backends.",
    )
    group.addoption(
        "--polysilicon-device",
        type=int,
        default=0,
        metavar="N",
        help="index of the device to open, in the order in which the backend's probe lists them",
    )
    group.addoption(
        "--polysilicon-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option to open the device with. May be repeated.",
    )
    group.addoption(
        "--polysilicon-seed",
        type=int,
        metavar="SEED",
        help="seed of the kit's random inputs; fresh in every run by default, printed on failure",
    )
    group.addoption(
        "--polysilicon-pairs",
        action="store_true",
        help="of the combinations of a test's parameters only so many that every two values meet: "
        "for devices that are slow, as emulators and interpreters are",
    )
    parser.addini(
        "polysilicon_backends",
        "backends that the kit judges where --polysilicon-backend is not given",
        type="args",
        default=[],
    )
    parser.addini(
        "polysilicon_xfail",
        "tests of the kit that are expected to fail, one a line, as `PATTERN: REASON`. PATTERN is "
        "matched against `FILE::TEST[PARAMETERS]`, * stands for anything. A test that is listed "
        "and passes fails the run.",
        type="linelist",
        default=[],
    )
