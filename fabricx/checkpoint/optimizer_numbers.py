"""States of optimizers with numbers of parameters, as torch has them, from states with names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, Final

HELD: Final = "held_gradient"  # key of a gradient in the state of a parameter, which torch's optimizers do not have


def numbered(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as `Optimizer.state_dict` of torch has it, from its state keyed by names.

    Args:
        saved: state and parameter groups, in which names stand for parameters.
    """
    numbers, groups = itertools.count(), []
    by_parameter: dict[str, int] = {}
    for group in saved["param_groups"]:
        of_group = {number: name for name, number in zip(group["params"], numbers, strict=False)}
        by_parameter |= {name: number for number, name in of_group.items()}
        groups.append({**group, "params": list(of_group)})
    values = {
        by_parameter[name]: {key: value for key, value in of_parameter.items() if key != HELD}
        for name, of_parameter in saved["state"].items()
        if name in by_parameter
    }
    return {"state": {number: value for number, value in values.items() if value}, "param_groups": groups}
