"""Imports of users with the package's name replaced."""

from __future__ import annotations

import importlib
import subprocess
import sys
from typing import Any

import pytest

import fabricx as fx

IMPORTS = """
import fabricx as L
import fabricx.pytorch as pl
import fabricx.pytorch.callbacks
from fabricx import LightningDataModule, LightningModule, Trainer, seed_everything
from fabricx.pytorch import Callback, LightningModule, Trainer, seed_everything
from fabricx.pytorch.accelerators import CPUAccelerator
from fabricx.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from fabricx.pytorch.callbacks import *
from fabricx.pytorch.callbacks.early_stopping import EarlyStopping
from fabricx.pytorch.callbacks.model_checkpoint import ModelCheckpoint
from fabricx.pytorch.callbacks.progress import TQDMProgressBar
from fabricx.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar
from fabricx.pytorch.core import LightningModule
from fabricx.pytorch.core.datamodule import LightningDataModule
from fabricx.pytorch.core.lightning import LightningModule
from fabricx.pytorch.core.module import LightningModule
from fabricx.pytorch.core.optimizer import LightningOptimizer
from fabricx.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from fabricx.pytorch.loggers.logger import DummyExperiment, Logger, rank_zero_experiment
from fabricx.pytorch.loggers.tensorboard import TensorBoardLogger
from fabricx.pytorch.profilers import SimpleProfiler
from fabricx.pytorch.strategies import DDPStrategy, FSDPStrategy
from fabricx.pytorch.strategies.ddp import DDPStrategy
from fabricx.pytorch.trainer import Trainer
from fabricx.pytorch.trainer.states import RunningStage, TrainerFn
from fabricx.pytorch.tuner import Tuner
from fabricx.pytorch.tuner.tuning import Tuner
from fabricx.pytorch.utilities import CombinedLoader, grad_norm, rank_zero_only
from fabricx.pytorch.utilities.combined_loader import CombinedLoader
from fabricx.pytorch.utilities.distributed import rank_zero_only
from fabricx.pytorch.utilities.exceptions import MisconfigurationException
from fabricx.pytorch.utilities.model_summary import ModelSummary, summarize
from fabricx.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from fabricx.pytorch.utilities.imports import _TORCHVISION_AVAILABLE
from fabricx.pytorch.utilities.seed import isolate_rng, seed_everything
from fabricx.pytorch.utilities.types import EVAL_DATALOADERS, STEP_OUTPUT, TRAIN_DATALOADERS, OptimizerLRScheduler
from fabricx.pytorch.utilities.types import _METRIC
from fabricx.pytorch.utilities.logger import _convert_params
from fabricx.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO
import fabricx.fabric
from fabricx.fabric import seed_everything
from fabricx.fabric.loggers import CSVLogger, TensorBoardLogger
from fabricx.fabric.loggers.logger import _DummyExperiment, Logger, rank_zero_experiment
from fabricx.fabric.plugins.io.torch_io import TorchCheckpointIO
from fabricx.fabric.utilities import move_data_to_device, rank_zero_only
from fabricx.fabric.utilities.apply_func import move_data_to_device
from fabricx.fabric.utilities.cloud_io import _load, get_filesystem
from fabricx.fabric.utilities.data import AttributeDict
from fabricx.fabric.utilities.imports import RequirementCache
from fabricx.fabric.utilities.logger import _add_prefix, _convert_params, _flatten_dict, _sanitize_params
from fabricx.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from fabricx.fabric.utilities.seed import pl_worker_init_function, seed_everything
from fabricx.fabric.utilities.types import _MAP_LOCATION_TYPE, _PATH, LRScheduler, ReduceLROnPlateau
from fabricx.fabric.utilities.warnings import PossibleUserWarning
from fabricx.pytorch.fabric.utilities.seed import seed_everything
""".strip().splitlines()[:-1]


@pytest.mark.parametrize("line", IMPORTS)
def test_code_with_the_import_replaced_works(line: str) -> None:
    namespace: dict[str, Any] = {}
    exec(line, namespace)
    assert len(namespace) > 1


def test_names_are_the_objects_of_fabricx() -> None:
    pl = fx.pytorch
    assert pl is importlib.import_module("fabricx.pytorch")
    assert pl.LightningModule is fx.LightningModule
    assert issubclass(fx.LightningModule, fx.Module)
    assert (pl.LightningDataModule, fx.LightningDataModule, pl.Trainer) == (fx.DataModule, fx.DataModule, fx.Trainer)
    assert pl.callbacks.ModelCheckpoint is fx.callbacks.ModelCheckpoint is pl.callbacks.model_checkpoint.ModelCheckpoint
    assert pl.loggers.MLFlowLogger is fx.loggers.MLFlowLogger
    assert issubclass(pl.loggers.CSVLogger, fx.loggers.CSVLogger)  # with Lightning's default of `name`
    assert pl.utilities.rank_zero.rank_zero_only is pl.utilities.rank_zero_only
    assert "EarlyStopping" in dir(pl.callbacks)
    assert {"callbacks", "LightningModule"} <= set(dir(pl))
    assert "rank_zero" in dir(pl.utilities)


@pytest.mark.parametrize(
    ("line", "error", "message"),
    [
        ("from fabricx import Fabric; Fabric(devices=2)", ImportError, "fabricx.Trainer"),
        ("from fabricx.pytorch.lite import LightningLite", ImportError, "use fabricx.Trainer"),
        ("from fabricx.pytorch.plugins import MixedPrecision as P; P()", ImportError, r"set Trainer\(precision="),
        ("import fabricx; fabricx.pytorch.plugins.environments.SLURMEnvironment()", ImportError, "are detected"),
        ("import fabricx; fabricx.pytorch.strategies.DeepSpeedStrategy()", ImportError, 'strategy="fsdp"'),
        ("import fabricx\nclass Own(fabricx.pytorch.callbacks.ModelPruning): ...", ImportError, "prune"),
        ("import fabricx.pytorch.callback", ModuleNotFoundError, "Did you mean 'callbacks'"),
        ("from fabricx.pytorch.callbacks import EarlyStoping", ImportError, "EarlyStoping"),
        ("import fabricx; fabricx.pytorch.callbacks.EarlyStoping", AttributeError, "Did you mean 'EarlyStopping'"),
        ("import fabricx; fabricx.pytorch.Trainr", AttributeError, "Did you mean 'Trainer'"),
    ],
)
def test_a_missing_name_is_an_error_that_names_the_alternative(line: str, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        exec(line, {})


def test_the_import_loads_no_heavy_modules() -> None:
    program = "import sys, fabricx.pytorch; print([name for name in ('torch', 'hydra') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "[]\n"


def test_a_logger_with_lightnings_methods_works_with_the_import_replaced(tmp_path: Any) -> None:

    from fabricx.testing import TinyModule, tiny_loader

    base: Any = importlib.import_module("fabricx.pytorch.loggers.logger")

    class CustomLogger(base.Logger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[Any] = []
            self.status = ""

        @property
        def name(self) -> str:
            return "mine"

        @property
        def version(self) -> str:
            return "0"

        @property
        @base.rank_zero_experiment
        def experiment(self) -> Any:
            return self.rows

        def log_hyperparams(self, params: Any) -> None:
            self.params = params

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.experiment.append((step, metrics))

        def finalize(self, status: str) -> None:
            super().finalize(status)
            self.status = status

    class Logs(TinyModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("a", 1.0)
            return super().training_step(batch, batch_idx)

    logger = CustomLogger()
    fx.Trainer(
        max_epochs=1, logger=logger, default_root_dir=tmp_path, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(Logs(lr=0.5), tiny_loader())  # fmt: skip
    assert logger.status == "success"
    assert logger.params == {"lr": 0.5}
    assert any("a" in metrics for _, metrics in logger.rows)
