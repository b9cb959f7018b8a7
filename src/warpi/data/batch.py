"""A batch of examples."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """B examples with their given labels."""

    views: tuple[Tensor, ...]  # each [B, ...]; one for most methods, more if a method sets `n_views`
    y: Tensor  # [B] given labels
    rows: Tensor  # [B] positions within the split, to index per-example state

    @property
    def x(self) -> Tensor:
        return self.views[0]

    def part(self, which: slice) -> "Batch":
        """The batch restricted to a slice of its examples."""
        return Batch(tuple(view[which] for view in self.views), self.y[which], self.rows[which])
