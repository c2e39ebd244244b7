"""A metric and its values, independent of the library that formats them for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Metric"]


@dataclass(slots=True)
class Metric:
    """One metric with a value for each combination of labels.

    Attributes
    ----------
    name : str
        Name of the metric, which ends in the unit. prometheus_client adds the suffix ``_total`` to the names of
        counters.
    help : str
        One sentence about the quantity and its source.
    is_counter : bool
        Whether the value only grows until the process or the machine restarts.
    values : dict
        Value by labels. The labels are pairs of name and value, in the same order for all values.
    """

    name: str
    help: str
    is_counter: bool = False
    values: dict[tuple[tuple[str, str], ...], float] = field(default_factory=dict)

    def add(self, labels: Mapping[str, object], value: float) -> None:
        """Add `value` to the value of these labels, which is 0 at first."""
        label_pairs = tuple((name, str(label)) for name, label in labels.items())
        self.values[label_pairs] = self.values.get(label_pairs, 0) + value
