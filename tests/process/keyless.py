"""A rank of a run on two machines without a key; at the end, rank 1 sends hostile pickles."""

from __future__ import annotations

import faulthandler
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import fabricx as fx
from fabricx.callbacks import ModelCheckpoint
from fabricx.distributed.messages import plain_data
from fabricx.testing import QUIET, LayeredModule, layered_data
from tests.process.attack import Exploit


def hostile(obj: Any) -> bytes:
    """Return a pickle that runs code when loaded; replaces `plain.dumps`."""
    return pickle.dumps((obj, Exploit("marker")))


class Exchanges(fx.Callback):
    """At the end of training, exchange objects that can't be sent or are hostile."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        world, errors = trainer.world, []
        plain_dumps = plain_data.dumps
        for poses in (False, True):
            if poses and world.rank == 1:
                plain_data.dumps = hostile
            for exchange in (world.gather_objects, lambda obj: world.broadcast_object(obj, 1)):
                try:
                    exchange(Exploit("marker") if world.rank == 1 else 0)
                except (TypeError, ValueError) as error:
                    errors.append(f"{type(error).__name__} {'FABRICX_KEY_FILE' in str(error)}")
                else:
                    errors.append("no error")
            world.barrier()
        plain_data.dumps = plain_dumps
        print(world.rank, errors, flush=True)


def main(folder: Path) -> None:
    """Fit with each strategy, with a checkpoint that the next stage starts from; then exchange hostile objects."""
    for strategy in ("ddp", "fsdp", "local_sgd"):
        torch.manual_seed(1)
        module = LayeredModule()
        loader = DataLoader(layered_data(16), 4)
        last = strategy == "local_sgd"
        saves = ModelCheckpoint(folder / strategy)
        trainer = fx.Trainer(
            strategy=strategy, num_nodes=2, max_epochs=1, default_root_dir=folder,
            callbacks=[saves, *([Exchanges()] if last else [])], **QUIET,
        )  # fmt: skip
        trainer.fit(module, loader)
        assert trainer.world.size == 2
        assert not trainer.world.secret
        trainer.fit(module, loader, ckpt_path="last")
    try:
        trainer.fit(module, loader, ckpt_path="nothing-is-here")
    except ValueError as error:
        print(os.environ["RANK"], "nothing-is-here" in str(error), flush=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(80, exit=True, file=sys.stderr)  # before the test's limit: show where ranks wait
    main(Path(sys.argv[1]))
