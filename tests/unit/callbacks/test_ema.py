from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fabricx import checkpoint
from fabricx.callbacks import EMA


def change(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def value(module: nn.Module) -> float:
    return float(next(module.parameters()).detach().flatten()[0])


def step(run: Any, new: float) -> None:
    change(run.module, new)
    run.step()


def test_the_average_follows_its_definition(trainer: Any) -> None:
    callback = EMA(decay=0.9)
    run = trainer(callback)
    change(run.module, 1.0)
    run.start()
    expected = 1.0
    for new in (2.0, 3.0, 5.0):
        step(run, new)
        expected = 0.9 * expected + 0.1 * new
    assert float(callback.averages["bias"][0]) == pytest.approx(expected, rel=1e-6)  # float32
    assert callback.updates == 3
    assert value(run.module) == 5.0


def test_validation_uses_the_averages_and_training_uses_the_weights(trainer: Any) -> None:
    run = trainer(EMA(decay=0.5))
    change(run.module, 0.0)
    run.start()
    step(run, 1.0)
    run.call("on_validation_start")
    assert value(run.module) == 0.5
    run.call("on_validation_end")
    assert value(run.module) == 1.0
    run.end()
    assert value(run.module) == 0.5


def test_a_checkpoint_during_validation_saves_the_weights_and_keeps_the_averages_in_the_module(trainer: Any) -> None:
    callback = EMA(decay=0.5)
    run = trainer(callback)
    change(run.module, 0.0)
    run.start()
    step(run, 1.0)
    run.call("on_validation_start")
    change(run.module, 7.0)  # by a hook
    with callback.trained_weights():
        assert value(run.module) == 1.0
        change(run.module, 3.0)  # as a strategy does whose checkpoint ends a round
    assert value(run.module) == 7.0
    run.call("on_validation_end")
    assert value(run.module) == 3.0
    with callback.trained_weights():
        assert value(run.module) == 3.0


def test_the_module_can_keep_the_trained_weights_after_fit(trainer: Any) -> None:
    callback = EMA(decay=0.5, apply_at_end=False, validate_with_ema=False)
    run = trainer(callback)
    change(run.module, 0.0)
    run.start()
    step(run, 1.0)
    run.validate()
    run.end()
    assert value(run.module) == 1.0
    assert float(callback.averages["bias"][0]) == 0.5


def test_start_step_and_every_n_steps_select_the_averaged_steps(trainer: Any) -> None:
    callback = EMA(decay=0.5, start_step=2, every_n_steps=2)
    run = trainer(callback)
    change(run.module, 0.0)
    run.start()
    for new in (1.0, 2.0, 3.0, 4.0):
        step(run, new)
    assert float(callback.averages["bias"][0]) == 3.0  # a copy of 2 at step 2; halfway to 4 at step 4
    assert callback.updates == 1


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_are_averaged_on_request(trainer: Any, use_buffers: bool) -> None:
    callback = EMA(decay=0.5, use_buffers=use_buffers)
    run = trainer(callback, module=nn.BatchNorm1d(3)).start()
    run.module.running_mean.fill_(1.0)
    run.step()
    run.end()
    assert run.module.running_mean[0] == (0.5 if use_buffers else 1.0)


def test_small_updates_are_not_lost_in_a_bfloat16_average(trainer: Any) -> None:
    callback = EMA(decay=0.999)
    run = trainer(callback, module=nn.Linear(2, 2).bfloat16())
    change(run.module, 1.0)
    run.start()
    for _ in range(100):
        step(run, 2.0)
        run.validate()  # changing places doesn't round the averages either
    assert float(callback.averages["bias"][0]) == pytest.approx(2 - 0.999**100, rel=1e-4)


def test_a_checkpoint_has_the_averages_and_training_continues_with_the_weights(trainer: Any, tmp_path: Any) -> None:
    def begin() -> Any:
        run = trainer(EMA(decay=0.5))
        change(run.module, 0.0)
        return run

    run = begin().start()
    step(run, 1.0)
    saved = checkpoint.load(run.save_checkpoint(tmp_path / "a"))
    assert saved["strategy"]["module"]["bias"][0] == 0.5
    assert value(run.module) == 1.0
    step(run, 2.0)

    again = begin()
    again.call("setup", "fit")
    again.module.load_state_dict(saved["strategy"]["module"])
    again.callbacks[0].load_state_dict(saved["callbacks"]["EMA"])
    assert value(again.module) == 0.5
    again.call("on_train_start")
    assert value(again.module) == 1.0
    step(again, 2.0)
    assert torch.equal(again.callbacks[0].averages["bias"], run.callbacks[0].averages["bias"])


def test_a_checkpoint_written_at_the_end_can_be_resumed(trainer: Any, tmp_path: Any) -> None:
    run = trainer(EMA(decay=0.5))
    change(run.module, 0.0)
    run.start()
    step(run, 1.0)
    run.call("on_train_end")
    saved = checkpoint.load(run.save_checkpoint(tmp_path / "a"))
    assert saved["strategy"]["module"]["bias"][0] == 0.5
    assert saved["callbacks"]["EMA"]["live"]["bias"][0] == 1.0


def test_tied_weights_are_saved_under_every_name(trainer: Any, tmp_path: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    module[1].weight = module[0].weight
    run = trainer(EMA(decay=0.5), module=module)
    change(module, 0.0)
    run.start()
    step(run, 1.0)
    weights = checkpoint.load(run.save_checkpoint(tmp_path / "a"))["strategy"]["module"]
    assert all(tensor.flatten()[0] == 0.5 for tensor in weights.values())


def test_an_error_during_validation_restores_the_weights(trainer: Any) -> None:
    run = trainer(EMA(decay=0.5))
    change(run.module, 0.0)
    run.start()
    step(run, 1.0)
    run.call("on_validation_start")
    run.call("on_exception", RuntimeError())
    assert value(run.module) == 1.0


def test_a_second_fit_begins_with_new_averages(trainer: Any) -> None:
    callback = EMA(decay=0.5)
    run = trainer(callback).start()
    step(run, 1.0)
    run.end()
    other = trainer(callback)
    change(other.module, 7.0)
    other.start()
    assert value(other.module) == 7.0
    assert callback.updates == 0


def test_a_rolled_back_run_continues_with_the_averages_of_that_step(trainer: Any) -> None:
    callback = EMA(decay=0.5)
    run = trainer(callback)
    change(run.module, 0.0)
    run.start()
    step(run, 1.0)
    earlier = {"averages": {n: a.clone() for n, a in callback.averages.items()}, "live": {}, "updates": 1}
    for new in (2.0, 3.0):
        step(run, new)
    run.global_step = 1  # as a recovery does: first the state, then the callbacks
    callback.load_state_dict(earlier)
    step(run, 2.0)
    assert float(callback.averages["bias"][0]) == 1.25
    assert callback.updates == 2


@pytest.mark.parametrize(
    "arguments", [{"decay": 1.5}, {"every_n_steps": 0}, {"every_n_steps": 1.5}, {"start_step": -1}]
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="EMA"):
        EMA(**arguments)


def test_complex_weights_are_averaged_too(trainer: Any) -> None:
    callback = EMA(decay=0.5)
    run = trainer(callback)
    run.module.turn = nn.Parameter(torch.tensor([1.0 + 2.0j]))
    run.start()
    with torch.no_grad():
        run.module.turn.fill_(3.0 - 2.0j)
    run.step()
    run.end()
    assert run.module.turn.tolist() == [2.0 + 0.0j]


def test_averages_follow_tensors_that_the_module_assigns(trainer: Any, tmp_path: Any) -> None:
    callback = EMA(decay=0.5, use_buffers=True)
    run = trainer(callback, module=nn.BatchNorm1d(3)).start()
    run.module.weight.data = torch.full((3,), 3.0)  # from the initial weights of 1
    run.module.running_mean = torch.ones(3)  # from zeros
    run.step()
    saved = checkpoint.load(run.save_checkpoint(tmp_path / "a"))["strategy"]["module"]
    assert (float(saved["weight"][0]), float(saved["running_mean"][0])) == (2.0, 0.5)
    run.call("on_validation_start")
    assert (value(run.module), float(run.module.running_mean[0])) == (2.0, 0.5)
    run.module.running_mean = torch.zeros(5)  # such as a mask, in a step of the validation
    run.call("on_validation_end")
    assert (value(run.module), run.module.running_mean.tolist()) == (3.0, [1.0, 1.0, 1.0])
    run.module.running_mean = torch.full((2,), 7.0)
    run.step()
    assert callback.averages["running_mean"].tolist() == [7.0, 7.0]


def test_averages_load_in_any_order_of_parameters(trainer: Any) -> None:
    """Pipeline stages save the averages of their blocks in sequence."""
    callback = EMA(decay=0.5)
    run = trainer(callback, module=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    run.call("setup", "fit")
    names = dict(run.module.named_parameters())
    averages = {name: torch.full_like(names[name], float(name[0])) for name in sorted(names, reverse=True)}
    change(run.module[0], 4.0)
    change(run.module[1], 8.0)
    callback.load_state_dict({"averages": averages, "live": {}, "updates": 1})
    run.call("on_train_start")
    run.step()
    assert [float(callback.averages[f"{n}.bias"][0]) for n in (0, 1)] == [2.0, 4.5]


def test_averages_of_different_tensors_start_again_with_a_warning(trainer: Any) -> None:
    callback = EMA(decay=0.5)
    run = trainer(callback)
    run.call("setup", "fit")
    callback.load_state_dict({"averages": {"other": torch.ones(1)}, "live": {}, "updates": 1})
    with pytest.warns(UserWarning, match=r"EMA begins anew .* than the module's \(bias, other, weight\)"):
        run.call("on_train_start")
