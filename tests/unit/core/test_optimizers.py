"""Each valid return value of `configure_optimizers`, and the errors for all other values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import fabricx as fx
from fabricx.core.optimizers import (
    OptimizerHandle,
    Schedule,
    load_schedules,
    need_metrics_each_step,
    needs_closure,
    parse_optimizers,
)
from fabricx.core.strategy import Traits
from fabricx.testing import QUIET, TinyModule, tiny_loader

ONE, TWO = SGD([nn.Parameter(torch.zeros(1))], lr=0.1), Adam([nn.Parameter(torch.zeros(1))])
STEPS, PLATEAU = StepLR(ONE, 1), ReduceLROnPlateau(TWO)


@pytest.mark.parametrize(
    ("result", "optimizers", "schedules"),
    [
        (None, [], []),
        (ONE, [ONE], []),
        ([ONE, TWO], [ONE, TWO], []),
        ((ONE, TWO), [ONE, TWO], []),
        (([ONE], [STEPS]), [ONE], [Schedule(STEPS)]),
        (([ONE], STEPS), [ONE], [Schedule(STEPS)]),
        (([ONE], {"scheduler": STEPS, "frequency": 2}), [ONE], [Schedule(STEPS, frequency=2)]),
        (([ONE, TWO], []), [ONE, TWO], []),
        ({"optimizer": ONE}, [ONE], []),
        ({"optimizer": ONE, "lr_scheduler": STEPS}, [ONE], [Schedule(STEPS)]),
        ({"optimizer": TWO, "lr_scheduler": PLATEAU, "monitor": "val"}, [TWO], [Schedule(PLATEAU, monitor="val")]),
        (
            [{"optimizer": ONE, "lr_scheduler": {"scheduler": STEPS, "interval": "step"}}, {"optimizer": TWO}],
            [ONE, TWO], [Schedule(STEPS, "step")],
        ),
    ],
)  # fmt: skip
def test_each_valid_form_is_accepted(result: Any, optimizers: list[Any], schedules: list[Schedule]) -> None:
    assert parse_optimizers(result) == (optimizers, schedules)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (3, r"returned int, which is not supported. Return an optimizer, a list"),
        ([ONE, 3], "returned list, which is not supported"),
        ([], "returned list"),
        ({"optimiser": ONE}, r"has the key 'optimiser'. Did you mean 'optimizer'\?"),
        ({"lr_scheduler": STEPS}, "has no 'optimizer'"),
        ({"optimizer": ONE, "frequency": 5}, "the key 'frequency', by which .* step them in turn in training_step"),
        ({"optimizer": ONE, "lr_scheduler": {"scheduler": STEPS, "frequenzy": 2}}, "Did you mean 'frequency'"),
        ({"optimizer": ONE, "lr_scheduler": {"scheduler": STEPS, "frequency": 0}}, "a whole number, 1 or more"),
        ({"optimizer": ONE, "lr_scheduler": {"interval": "step"}}, "has no 'scheduler'"),
        (([ONE], [TWO]), "returned [A-Za-z]+ as a learning rate scheduler"),
        (([ONE], [torch.optim.lr_scheduler.StepLR]), "returned type as a learning rate scheduler"),
        ({"optimizer": ONE, "lr_scheduler": [STEPS]}, "list as a learning rate scheduler.*lists: .optimizer"),
        ({"optimizer": ONE, "lr_scheduler": {"scheduler": STEPS, "interval": "batch"}}, "must be 'step' or 'epoch'"),
        ({"optimizer": TWO, "lr_scheduler": PLATEAU}, "ReduceLROnPlateau needs the name of a metric"),
    ],
)
def test_an_invalid_form_is_an_error_that_shows_the_valid_form(result: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_optimizers(result)


def test_an_unknown_key_is_ignored_with_a_warning() -> None:
    with pytest.warns(RuntimeWarning, match="has the key 'foo'.*\n.*\n  it is ignored"):
        parsed = parse_optimizers({"optimizer": ONE, "lr_scheduler": {"scheduler": STEPS, "foo": 1}})
    assert parsed == ([ONE], [Schedule(STEPS)])


def test_one_cycle_by_epochs_is_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    cycle = torch.optim.lr_scheduler.OneCycleLR(ONE, 0.1, total_steps=9)
    parse_optimizers({"optimizer": ONE, "lr_scheduler": {"scheduler": cycle, "interval": "step"}})
    parse_optimizers({"optimizer": ONE, "lr_scheduler": cycle}, manual=True)
    assert not recwarn
    with pytest.warns(RuntimeWarning, match="OneCycleLR makes a step each epoch, 9 in all"):
        parse_optimizers({"optimizer": ONE, "lr_scheduler": cycle})


def test_a_plateau_scheduler_of_manual_optimization_needs_no_metric() -> None:
    assert parse_optimizers({"optimizer": TWO, "lr_scheduler": PLATEAU}, manual=True) == ([TWO], [Schedule(PLATEAU)])
    of_user: Any = object()  # whose methods the module calls
    assert parse_optimizers([[TWO], [of_user]], manual=True) == ([TWO], [Schedule(of_user)])


@pytest.mark.parametrize("option", [{"interval": "step"}, {"frequency": 2}, {"monitor": "val"}], ids=str)
def test_the_interval_of_a_schedule_in_manual_optimization_is_a_warning(option: dict[str, Any]) -> None:
    category = RuntimeWarning if "monitor" in option else UserWarning  # as in Lightning
    with pytest.warns(category, match=r"monitor of StepLR have no effect.*self.lr_schedulers\(\).step\(\)"):
        parse_optimizers({"optimizer": ONE, "lr_scheduler": {"scheduler": STEPS, **option}}, manual=True)


def test_a_state_loads_only_into_schedules_of_the_same_description() -> None:
    schedules = [Schedule(STEPS, "step", 3)]
    assert schedules[0].described == "StepLR by 3 steps"
    state = {**STEPS.state_dict(), "last_epoch": 7}
    load_schedules(schedules, [state], ["StepLR by 3 steps"])
    assert STEPS.last_epoch == 7
    load_schedules(schedules, [state], None)  # an old checkpoint, which doesn't describe them
    for states, described in (([state], ["StepLR by epoch"]), ([], []), ([state] * 2, None)):
        with pytest.raises(ValueError, match="the module's are: StepLR by 3 steps"):
            load_schedules(schedules, states, described)
    by_rule = Schedule(torch.optim.lr_scheduler.LambdaLR(ONE, lambda epoch: 0.5))
    more = {**by_rule.scheduler.state_dict(), "lr_lambdas": [None, None]}
    with pytest.raises(ValueError, match="added a function to LambdaLR"):
        load_schedules([by_rule], [more], None)


@pytest.mark.parametrize(("interval", "each_step"), [("step", True), ("epoch", False)])
def test_a_metric_after_each_update_needs_ranks_in_lockstep(interval: Any, each_step: bool) -> None:
    plateau, together, apart = (Schedule(PLATEAU, interval, monitor="loss"), *map(strategy, (True, False)))
    assert need_metrics_each_step([plateau, Schedule(STEPS, "step")], together) is each_step
    assert not need_metrics_each_step([Schedule(STEPS, "step")], apart)
    if each_step:
        with pytest.raises(ValueError, match="set interval='epoch'"):
            need_metrics_each_step([plateau], apart)


def strategy(lockstep: bool) -> Any:
    return SimpleNamespace(traits=Traits(lockstep=lockstep))


def test_an_optimizer_that_calls_its_closure_several_times_needs_a_closure() -> None:
    assert needs_closure(LBFGS([nn.Parameter(torch.zeros(1))]))
    assert not needs_closure(ONE)


def test_a_handle_is_the_optimizer_except_for_its_step() -> None:
    steps: list[Any] = []
    handle: Any = OptimizerHandle(ONE, lambda optimizer, closure, **options: steps.append((closure, options)))
    assert handle.param_groups is ONE.param_groups
    handle.note = "kept"
    assert ONE.note == "kept"  # type: ignore[attr-defined]
    assert isinstance(handle, torch.optim.SGD)
    assert handle.step() is None
    handle.step(lambda: 7.0, scale=2)
    assert steps[0] == (None, {})
    assert steps[1][0]() == 7.0
    assert steps[1][1] == {"scale": 2}
    ONE.param_groups[0]["params"][0].grad = torch.ones(1)
    handle.zero_grad()
    assert ONE.param_groups[0]["params"][0].grad is None


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    first, second = SGD(TinyModule().parameters(), lr=0.1), SGD(TinyModule().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="returned a StepLR of another optimizer than it returned"):
        parse_optimizers({"optimizer": first, "lr_scheduler": StepLR(second, 1)})


def test_optimizers_that_do_not_train_the_module_are_a_warning() -> None:
    class Foreign(TinyModule):
        def configure_optimizers(self) -> Any:
            return SGD(TinyModule().parameters(), lr=0.1)

    class Forgets(TinyModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    for module, message in (
        (Foreign(), "Create the optimizer in configure_optimizers, from self"),
        (Forgets(), "no optimizer made a step in the epoch"),
    ):
        with pytest.warns(UserWarning, match=message):
            fx.Trainer(max_epochs=1, **QUIET).fit(module, tiny_loader())
