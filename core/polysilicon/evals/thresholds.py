"""Bounds that figures must keep, for continuous integration."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polysilicon.errors import ConfigError, PolysiliconError


class QualityError(PolysiliconError):
    """A figure does not keep the bound that was given for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Threshold:
    """option: as the user gave it. figure: whose value must be at most `bound`, or with `at_least`
    at least that."""

    option: str
    figure: str
    bound: float
    at_least: bool = False

    def failure(self, figures: Mapping[str, float | None]) -> str | None:
        """Why the figure does not keep the bound; None where it does. One that is not finite keeps
        none."""
        value = figures[self.figure]
        assert value is not None
        if (value >= self.bound) if self.at_least else (value <= self.bound):
            return None
        relation = "below" if self.at_least else "above"
        return f"{self.figure} is {value:.6g}, {relation} {self.option} {self.bound:g}"


def threshold(option: str, figure: str, bound: float, *, at_least: bool = False) -> Threshold:
    """Raises ConfigError for a bound that makes no sense."""
    if at_least and not 0 <= bound <= 1:
        raise ConfigError(f"{option} is a share between 0 and 1, not {bound:g}")
    if not 0 <= bound < float("inf"):
        raise ConfigError(f"{option} must be a number of 0 or more, not {bound:g}")
    return Threshold(option=option, figure=figure, bound=bound, at_least=at_least)


def failures(thresholds: Sequence[Threshold], figures: Mapping[str, float | None]) -> list[str]:
    """The reasons of all that do not hold."""
    reasons = (item.failure(figures) for item in thresholds)
    return [reason for reason in reasons if reason is not None]
