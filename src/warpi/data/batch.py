"""The batch: what a loader yields and a method learns from."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """B examples with the labels they were given."""

    views: tuple[Tensor, ...]  # each [B, ...]; one for most methods, more where a method asks for `n_views`
    y: Tensor  # [B] given labels
    rows: Tensor  # [B] positions within the split: the index of a per-example memory

    @property
    def x(self) -> Tensor:
        return self.views[0]

    def part(self, which: slice) -> "Batch":
        """Some of its examples."""
        return Batch(tuple(view[which] for view in self.views), self.y[which], self.rows[which])
