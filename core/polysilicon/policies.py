"""Who goes first: scheduling policies as objects that the scheduler asks.

A policy gives every sequence its place in the order and says who may displace whom. It knows no
clock: times are seconds of whatever clock the scheduler's caller reads.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

Order = tuple[float, float, int]
"""A place; the smaller goes first."""

FIRST: Order = (-1.0, 0.0, 0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What a sequence's place follows from.

    arrival: seconds. serial: order of submission. priority: smaller is more urgent. ttft, tpot:
    seconds to the first token and for each further one that its SLO allows; None where it asks for
    nothing.
    """

    arrival: float = 0.0
    serial: int = 0
    priority: int = 0
    ttft: float | None = None
    tpot: float | None = None

    @property
    def deadline(self) -> float | None:
        """When the first token is due, in seconds; None where there is no SLO for it."""
        return None if self.ttft is None else self.arrival + self.ttft


class Policy(Protocol):
    """heeds_priority: whether priorities change the order. guards_slo: sequences that can no longer
    meet their TTFT come after all that can, and no more decode at once than their TPOT bears."""

    @property
    def name(self) -> str: ...

    @property
    def heeds_priority(self) -> bool: ...

    @property
    def guards_slo(self) -> bool: ...

    def order(self, claim: Claim, *, late: bool) -> Order:
        """The place of a sequence; late: its TTFT can no longer be met."""

    def displaces(self, claim: Claim, other: Claim, *, other_late: bool) -> bool:
        """Whether a sequence that waits, and is not late, may take the place of one that runs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FirstCome:
    """In the order of arrival; nobody is displaced for a later one."""

    name = "fcfs"
    heeds_priority = False
    guards_slo = False

    def order(self, claim: Claim, *, late: bool) -> Order:
        return (0.0, claim.arrival, claim.serial)

    def displaces(self, claim: Claim, other: Claim, *, other_late: bool) -> bool:
        return False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PriorityFirst:
    """A request of priority p comes as if it had arrived `p * patience` seconds later: a smaller
    priority goes first, nobody waits for ever, and where none is given it is first come, first
    served. A smaller priority displaces what runs."""

    patience: float = 60.0
    name = "priority"
    heeds_priority = True
    guards_slo = False

    def order(self, claim: Claim, *, late: bool) -> Order:
        return (0.0, claim.arrival + claim.priority * self.patience, claim.serial)

    def displaces(self, claim: Claim, other: Claim, *, other_late: bool) -> bool:
        return claim.priority < other.priority and self.order(claim, late=False) < self.order(
            other, late=False
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineFirst:
    """For goodput: the earliest due first token goes first (a request without a TTFT is due after
    `patience` seconds, and a priority of p adds p times as many). Who can no longer make it comes
    after all who can, and gives its place up to them: under overload this keeps the work for
    requests that still count."""

    patience: float = 60.0
    name = "slo"
    heeds_priority = True
    guards_slo = True

    def order(self, claim: Claim, *, late: bool) -> Order:
        wait = self.patience if claim.ttft is None else claim.ttft
        due = claim.arrival + wait + claim.priority * self.patience
        return (float(late), due, claim.serial)

    def displaces(self, claim: Claim, other: Claim, *, other_late: bool) -> bool:
        return other_late or claim.priority < other.priority


POLICIES: dict[str, Policy] = {
    policy.name: policy for policy in (FirstCome(), PriorityFirst(), DeadlineFirst())
}
"""By name, as `--policy` gives it."""
