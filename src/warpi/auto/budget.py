"""What fits into a time budget: the number of trees, gold, and how often the procedure is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from warpi.auto.models import Plan, fit_model
from warpi.auto.problem import Clock, Problem

NO_TIME = "left out, because the time budget was used up"
PROBED_TREES = 4  # that show how long a tree takes
FEWEST_TREES = 15
FORESTS = 25  # of all rows, which take as long as everything that `auto` does with forests
GOLD_FITS = 2.0  # of a model, which take as long as its part in gold


def limit_trees(problem: Problem, models: Sequence[Any], plan: Plan, clock: Clock) -> tuple[Plan, dict[str, str]]:
    """The plan with as many trees per forest as the budget allows, and what that leaves out."""
    if clock.budget is None or "forest" not in models:
        return plan, {}
    began = clock.left()
    fit_model("forest", problem.x, problem.labels, problem.weights(1.0, 1.0), replace(plan, n_trees=PROBED_TREES))
    seconds = max(began - clock.left(), 1e-9) / PROBED_TREES  # of a tree
    trees = int(np.clip(max(clock.left(), 0) / (FORESTS * seconds), min(FEWEST_TREES, plan.n_trees), plan.n_trees))
    if trees == plan.n_trees:
        return plan, {}
    return replace(plan, n_trees=trees), {f"trees {trees + 1} to {plan.n_trees} of each forest": NO_TIME}
