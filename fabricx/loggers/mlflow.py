"""Logger of MLflow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, final

from fabricx.core.logger import Ending
from fabricx.loggers.files import prefixed
from fabricx.loggers.services import LogModel, ServiceLogger, Uploads, client, new_id, parameters, require
from fabricx.loggers.tensorboard import flatten

_STATUS: Final[Mapping[Ending, str]] = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
_TAG: Final = "fabricx.id"  # finds the run of a worker that was replaced
_LONGEST: Final = 250  # characters of a parameter
_BATCH: Final = 100  # parameters in a request


@final
class MLFlowLogger(ServiceLogger):
    """Log to MLflow (pip install 'fabricx[mlflow]'); arguments are those of Lightning's `MLFlowLogger`.

    A fit that resumes, or a worker that replaces another, continues the same run of the service.

    Args:
        experiment_name: name of the experiment, which is created if needed.
        run_name: display name; default: the name of the run's folder.
        tracking_uri: address of the server; default: $MLFLOW_TRACKING_URI, or the folder `save_dir`.
        tags: the run's tags.
        save_dir: folder, if there is no tracking_uri.
        log_model: upload checkpoints as artifacts: True at the end, "all" during training.
        prefix: prefix of the names of metrics.
        artifact_location: folder of artifacts of a new experiment.
        run_id: an existing run to continue.
        synchronous: False sends metrics in the background.

    Raises:
        ModuleNotFoundError: mlflow is not installed.
    """

    def __init__(
        self,
        experiment_name: str = "lightning_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: LogModel = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
        synchronous: bool | None = None,
    ) -> None:
        require("MLFlowLogger", "mlflow", "mlflow", "mlflow")
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._folder = None if uri else Path(save_dir or "./mlruns").absolute()
        self._uri = uri or f"file:{self._folder}"
        self._experiment_name, self._run_name, self._tags = experiment_name, run_name, dict(tags or {})
        self._prefix, self._artifacts, self._run_id, self._id = prefix, artifact_location, run_id, new_id(16)
        self._options = {} if synchronous is None else {"synchronous": synchronous}
        self._uploads = Uploads(log_model)
        super().__init__()
        self._experiment_id: str | None = None

    def _start(self, run_dir: Path) -> Any:
        if self._folder is not None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow refuses folders by default
        service = client("mlflow").MlflowClient(self._uri)
        existing = service.get_experiment_by_name(self._experiment_name)
        self._experiment_id = (
            existing.experiment_id if existing is not None
            else service.create_experiment(self._experiment_name, artifact_location=self._artifacts)
        )  # fmt: skip
        if self._run_id is None:
            runs = service.search_runs([self._experiment_id], f"tags.`{_TAG}` = '{self._id}'")
            made = runs[0] if runs else service.create_run(
                self._experiment_id, tags={**self._tags, _TAG: self._id}, run_name=self._run_name or run_dir.name
            )  # fmt: skip
            self._run_id = made.info.run_id
        service.update_run(self._run_id, status="RUNNING")
        return service

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._run is not None:
            now, metric = int(time.time() * 1000), client("mlflow.entities").Metric
            named = {_valid(name): value for name, value in prefixed(metrics, self._prefix).items()}
            rows = [metric(name, value, now, step or 0) for name, value in named.items()]
            self._run.log_batch(self._run_id, metrics=rows, **self._options)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        if self._run is None:
            return
        param = client("mlflow.entities").Param
        known = self._run.get_run(self._run_id).data.params  # a value can't be changed
        flat = {_valid(name): str(value)[:_LONGEST] for name, value in flatten(parameters(params)).items()}
        rows = [param(name, value) for name, value in flat.items() if name not in known]
        for begin in range(0, len(rows), _BATCH):
            self._run.log_batch(self._run_id, params=rows[begin : begin + _BATCH], **self._options)

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        if self._run is not None:
            self._run.log_text(self._run_id, text, f"{name}{f'-{step}' if step else ''}.txt")

    def checkpoints_saved(self, kept: list[str]) -> None:
        self._upload(self._uploads.after_save(kept))

    def _upload(self, paths: list[str]) -> None:
        for path in paths:
            log = self._run.log_artifact if Path(path).is_file() else self._run.log_artifacts
            log(self._run_id, path, f"model/checkpoints/{Path(path).stem}")

    def _finish(self, status: Ending) -> None:
        self._upload(self._uploads.at_end())

    def _end(self, run: Any, status: Ending) -> None:
        run.set_terminated(self._run_id, _STATUS[status])

    def for_caller(self) -> dict[str, Any]:
        return {**super().for_caller(), "_run_id": self._run_id, "_experiment_id": self._experiment_id}

    @property
    def run_id(self) -> str | None:
        """Return the id of the run; None before it has begun."""
        return self._run_id

    @property
    def experiment_id(self) -> str | None:
        """Return the id of the experiment; None before the run has begun."""
        return self._experiment_id

    @property
    def name(self) -> str:
        return self._experiment_name

    @property
    def version(self) -> str | None:
        return self._run_id


def _valid(name: str) -> str:
    """Return a name without the characters that MLflow refuses, as Lightning's logger does.

    >>> _valid("val/acc@1")
    'val/acc1'

    Args:
        name: of a metric or a hyperparameter.
    """
    return re.sub(r"[^\w/.: -]+", "", name)
