"""Cost without the state guard. A module of its own: stock's workers would import it, too."""

from __future__ import annotations

from benchmarks.probes.cost import Cost
from torchcontinuous._state_guard import PROBES


class Unguarded(Cost):
    """With every probe of the state guard off: what is saved is the guard's cost."""

    guard = dict.fromkeys(PROBES, "off")
