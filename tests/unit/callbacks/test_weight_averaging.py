from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812
import pytest
import torch
from lightning.pytorch import callbacks as theirs
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_avg_fn, get_ema_multi_avg_fn

import fabricx as fx
from fabricx import checkpoint
from fabricx.callbacks import EMA, EMAWeightAveraging, WeightAveraging
from fabricx.testing import tiny_loader


class Body:
    """The same module for Lightning and fabricx, with buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.validated: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch[0]).square().mean()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.net[0].weight.detach().clone())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.2)


class OfFabricx(Body, fx.Module):  # type: ignore[misc]
    pass


class OfLightning(Body, L.LightningModule):  # type: ignore[misc]
    pass


class Chosen:
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx in (1, 4, 5) or epoch_idx == 1


class OursChosen(Chosen, WeightAveraging):
    pass


class TheirsChosen(Chosen, theirs.WeightAveraging):  # type: ignore[misc]
    pass


@pytest.mark.parametrize("arguments", [
    ("EMAWeightAveraging", {"decay": 0.7}),
    ("EMAWeightAveraging", {"decay": 0.7, "update_every_n_steps": 3, "update_starting_at_step": 2}),
    ("EMAWeightAveraging", {"decay": 0.5, "update_every_n_steps": 0, "update_starting_at_epoch": 1}),
    ("WeightAveraging", {}),
    ("WeightAveraging", {"avg_fn": get_ema_avg_fn(0.6), "use_buffers": False}),
    ("WeightAveraging", {"multi_avg_fn": get_ema_multi_avg_fn(0.6)}),
    ("Chosen", {}),
], ids=lambda arguments: "-".join([arguments[0], *arguments[1]]))  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of Lightning
def test_averages_are_equal_to_lightnings(arguments: Any, quiet: dict[str, Any]) -> None:
    name, options = arguments
    ours, same = OfFabricx(), OfLightning()
    callback = OursChosen() if name == "Chosen" else getattr(fx.callbacks, name)(**options)
    fx.Trainer(max_epochs=3, callbacks=[callback], **quiet).fit(ours, tiny_loader(), tiny_loader())
    callback = TheirsChosen() if name == "Chosen" else getattr(theirs, name)(**options)
    trainer = L.Trainer(max_epochs=3, callbacks=[callback], **quiet)
    trainer.fit(same, tiny_loader(), tiny_loader())
    for (key, wanted), actual in zip(same.state_dict().items(), ours.state_dict().values(), strict=True):
        if "num_batches" not in key and not ("running" in key and options.get("use_buffers") is False):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)  # different order of multiplications
    for actual, wanted in zip(ours.validated[1:], same.validated[1:], strict=True):  # after the sanity check
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_callbacks_of_lightning_average_in_a_run_of_fabricx(quiet: dict[str, Any]) -> None:
    def end(callback: Any) -> Tensor:
        module = OfFabricx()
        fx.Trainer(max_epochs=2, callbacks=[callback], **quiet).fit(module, tiny_loader())
        return module.net[0].weight.detach()

    torch.testing.assert_close(end(theirs.EMAWeightAveraging(decay=0.6)), end(EMAWeightAveraging(decay=0.6)))
    assert torch.equal(end(TheirsChosen()), end(OursChosen()))


def test_a_checkpoint_has_the_averages_and_a_resumed_run_the_weights(quiet: dict[str, Any], tmp_path: Path) -> None:
    class Saves(fx.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def fit(callback: WeightAveraging, *others: fx.Callback, ckpt: Path | None = None) -> OfFabricx:
        module = OfFabricx()
        fx.Trainer(max_epochs=2, callbacks=[callback, *others], **quiet).fit(module, tiny_loader(), ckpt_path=ckpt)
        return module

    whole = fit(EMAWeightAveraging(decay=0.6, update_every_n_steps=2), Saves())
    state = checkpoint.load(tmp_path / "middle.ckpt")
    live = state["callbacks"]["EMAWeightAveraging"]["live"]["net.0.weight"]
    assert not torch.equal(state["strategy"]["module"]["net.0.weight"], live)
    rest = fit(EMAWeightAveraging(decay=0.6, update_every_n_steps=2), ckpt=tmp_path / "middle.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(rest.state_dict()[name], weight), name


def test_runs_that_cannot_be_averaged_are_refused(quiet: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="set one of them"):
        WeightAveraging(avg_fn=max, multi_avg_fn=max)
    with pytest.raises(ValueError, match="decay must be from 0"):
        EMAWeightAveraging(decay=2)
    trainer = fx.Trainer(max_epochs=1, callbacks=[EMA(), WeightAveraging()], **quiet)
    with pytest.raises(ValueError, match=r"several averages of weights \(EMA, WeightAveraging\)"):
        trainer.fit(OfFabricx(), tiny_loader())
    trainer = fx.Trainer(max_epochs=1, callbacks=[WeightAveraging()], strategy="local_sgd", **quiet)
    with pytest.raises(ValueError, match="use strategy=ddp or fsdp, or the callback EMA"):
        trainer.fit(OfFabricx(), tiny_loader())


class Renames(OfFabricx):
    """Replaces the weights of checkpoints in its hooks, as modules do that have renamed their layers."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {name.removeprefix("old."): v for name, v in checkpoint["state_dict"].items()}


def test_a_run_resumes_with_its_weights_if_hooks_replace_those_of_the_checkpoint(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    def fit(epochs: int, ckpt: Path | None = None) -> fx.Trainer:
        trainer = fx.Trainer(
            max_epochs=epochs, callbacks=[EMA(decay=0.5), Saves(tmp_path)], **{**quiet, "num_sanity_val_steps": 0}
        )
        trainer.fit(Renames(), tiny_loader(), ckpt_path=ckpt)
        return trainer

    whole = fit(2).module.state_dict()
    resumed = fit(2, tmp_path / "0.ckpt").module.state_dict()
    for name, weight in whole.items():
        assert torch.equal(resumed[name], weight), name


class Saves(fx.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.current_epoch}.ckpt")


def test_a_run_that_resumes_from_a_checkpoint_after_a_fit_has_only_the_averages(
    quiet: dict[str, Any], tmp_path: Path
) -> None:
    def trainer(epochs: int, **options: Any) -> fx.Trainer:
        return fx.Trainer(max_epochs=epochs, callbacks=[EMA(decay=0.5, **options)], **quiet)

    path, module = tmp_path / "after.ckpt", OfFabricx()
    first = trainer(1)
    first.fit(module, tiny_loader())
    first.save_checkpoint(path)
    with pytest.warns(UserWarning, match="saved after a fit and has only the averages of EMA"):
        trainer(2).fit(OfFabricx(), tiny_loader(), ckpt_path=path)
    first = trainer(1, apply_at_end=False)  # the module keeps its weights: warnings are errors
    first.fit(module, tiny_loader())
    trainer(2, apply_at_end=False).fit(OfFabricx(), tiny_loader(), ckpt_path=first.save_checkpoint(path))
