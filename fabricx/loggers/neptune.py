"""Logger of Neptune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from fabricx.core.logger import Ending
from fabricx.loggers.files import prefixed
from fabricx.loggers.services import ServiceLogger, client, new_id, parameters, require


@final
class NeptuneLogger(ServiceLogger):
    """Log to a Neptune server (pip install 'fabricx[neptune]'); arguments are those of Lightning 2.5.

    The hosted service of neptune.ai has ended, and Lightning has removed its logger. Servers of your own, and
    `mode="offline"`, still work with the client `neptune`.

    Args:
        api_key, project, name: of the run; default of the name: that of the run's folder.
        run: a run of Neptune to use; only with a single process.
        log_model_checkpoints: must be False: checkpoints stay in the run's folder.
        prefix: namespace of metrics and hyperparameters.
        **neptune_run_kwargs: of `neptune.init_run`, such as `tags`, `mode` or `with_id`.

    Raises:
        ModuleNotFoundError: neptune is not installed.
        ValueError: checkpoints should be uploaded.
    """

    def __init__(
        self,
        *,
        api_key: str | None = None,
        project: str | None = None,
        name: str | None = None,
        run: Any = None,
        log_model_checkpoints: bool = False,
        prefix: str = "training",
        **neptune_run_kwargs: Any,
    ) -> None:
        require("NeptuneLogger", "neptune", "neptune", "neptune")
        if log_model_checkpoints:
            raise ValueError(
                "NeptuneLogger(log_model_checkpoints=True): checkpoints are not uploaded; set False, and call "
                "run['model'].upload(trainer.checkpoint_callback.best_model_path) after fit"
            )
        self._project, self._name, self._prefix = project, name, prefix
        self._init = {"api_token": api_key, "custom_run_id": new_id(16), **neptune_run_kwargs}
        super().__init__(run)

    def _start(self, run_dir: Path) -> Any:
        return client("neptune").init_run(project=self._project, name=self._name or run_dir.name, **self._init)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._run is not None:
            for name, value in prefixed(metrics, self._prefix, "/").items():
                self._run[name].append(value, step=step)

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        if self._run is not None:
            key = f"{self._prefix}/hyperparams" if self._prefix else "hyperparams"
            self._run[key] = client("neptune.utils").stringify_unsupported(parameters(params))

    def log_text(self, name: str, text: str, step: int = 0) -> None:
        if self._run is not None:
            self._run[f"texts/{name}"].append(text)

    def _finish(self, status: Ending) -> None:
        self._run["status"] = status

    def _end(self, run: Any, status: Ending) -> None:
        run.stop()

    @property
    def name(self) -> str:
        return self._project or "neptune"

    @property
    def version(self) -> str:
        return str(self._init["custom_run_id"])
