"""Logger of Comet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, final

from fabricx.core.logger import Ending
from fabricx.loggers.files import prefixed
from fabricx.loggers.services import ServiceLogger, client, new_id, parameters, require

# Arguments of earlier versions of Lightning.
_FORMER: Final[Mapping[str, str]] = {"experiment_name": "name", "save_dir": "offline_directory"}


@final
class CometLogger(ServiceLogger):
    """Log to Comet (pip install 'fabricx[comet]'); with the arguments of Lightning's `CometLogger`.

    A resumed fit and a replacement of a dead worker continue the same experiment.

    Args:
        api_key: default: from comet's configuration or $COMET_API_KEY.
        workspace, project: of the experiment.
        experiment_key: key of an existing or new experiment; default: a random key.
        mode: mode of `comet_ml.start`: "get_or_create", "get" or "create".
        online: False writes an archive to `offline_directory`, by default the run's folder.
        prefix: prefix of the names of metrics.
        **kwargs: of `comet_ml.ExperimentConfig`, such as `name`, `tags` or `offline_directory`.

    Raises:
        ModuleNotFoundError: comet_ml is not installed.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "get", "create"] | None = None,
        online: bool | None = None,
        prefix: str = "",
        **kwargs: Any,
    ) -> None:
        require("CometLogger", "comet_ml", "comet-ml", "comet")
        if "offline" in kwargs:
            online = not kwargs.pop("offline")
        self._project = project or kwargs.pop("project_name", None)
        self._api_key, self._workspace, self._mode, self._online = api_key, workspace, mode, online
        self._key = experiment_key or new_id(32)
        self._config = {_FORMER.get(name, name): value for name, value in kwargs.items()}
        self._prefix = prefix
        super().__init__()

    def _start(self, run_dir: Path) -> Any:
        comet = client("comet_ml")
        folder = {"offline_directory": str(run_dir)} if self._online is False else {}
        config = comet.ExperimentConfig(**{"name": run_dir.name, **folder, **self._config})
        run = comet.start(
            api_key=self._api_key, workspace=self._workspace, project=self._project, experiment_key=self._key,
            mode=self._mode, online=self._online, experiment_config=config,
        )  # fmt: skip
        run.log_other("Created from", "fabricx")
        return run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._run is not None:
            values = {name: value for name, value in metrics.items() if name != "epoch"}
            epoch = metrics.get("epoch")
            self._run.log_metrics(
                prefixed(values, self._prefix), step=step, epoch=None if epoch is None else int(epoch)
            )

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        if self._run is not None:
            self._run.log_parameters(parameters(params))

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        if self._run is not None:
            self._run.log_text(text, step=step, metadata={"name": name})

    def log_graph(self, module: Any, example: object = None) -> None:
        if self._run is not None:
            self._run.set_model_graph(str(module))

    def _end(self, run: Any, status: Ending) -> None:
        run.log_other("Status", status)
        run.end()

    @property
    def name(self) -> str:
        return self._project or "comet-default"

    @property
    def version(self) -> str:
        return self._key
