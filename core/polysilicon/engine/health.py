"""How an engine process is, in words for operators."""

from __future__ import annotations

import dataclasses
from typing import Literal

State = Literal["starting", "ready", "restarting", "draining", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Health:
    """state: `starting` until the first engine has loaded; `ready`; `restarting` after one died;
    `draining` while running requests may finish; `failed` when it was given up or has been ended.
    reason: why it is not ready, in words; empty when it is.
    """

    state: State
    reason: str = ""

    @property
    def healthy(self) -> bool:
        """What `/health` answers: the engine does, or could do, its work."""
        return self.state in ("ready", "draining")

    @property
    def ready(self) -> bool:
        """What `/ready` answers: new requests are taken."""
        return self.state == "ready"
