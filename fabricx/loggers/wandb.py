"""Logger of Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

from fabricx.core.logger import Ending
from fabricx.loggers.files import prefixed
from fabricx.loggers.services import LogModel, ServiceLogger, Uploads, client, new_id, parameters, require


@final
class WandbLogger(ServiceLogger):
    """Log to Weights & Biases (pip install 'fabricx[wandb]'); arguments are those of Lightning's `WandbLogger`.

    The x axis of all metrics is `trainer/global_step`. A fit that resumes, or a worker that replaces another, continues
    the same run of the service.

    Args:
        name: display name; default: the name of the run's folder.
        save_dir, dir: folder of wandb's files; default: the run's folder.
        version, id: id of the run; default: a random id.
        offline: write files only; `wandb sync` uploads them.
        anonymous: passed to `wandb.init`.
        project: default: $WANDB_PROJECT, or "lightning_logs".
        log_model: upload checkpoints as artifacts: True at the end, "all" during training.
        experiment: a run of wandb to use; only with a single process.
        prefix: prefix of the names of metrics.
        checkpoint_name: name of the artifact; default: "model-ID".
        add_file_policy: passed to `Artifact.add_dir`.
        **kwargs: of `wandb.init`, such as `tags`, `group` or `entity`.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: checkpoints can't be uploaded offline.
    """

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = None,
        version: str | None = None,
        offline: bool = False,
        dir: str | os.PathLike[str] | None = None,
        id: str | None = None,
        anonymous: bool | None = None,
        project: str | None = None,
        log_model: LogModel = False,
        experiment: Any = None,
        prefix: str = "",
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **kwargs: Any,
    ) -> None:
        require("WandbLogger", "wandb", "wandb", "wandb")
        if offline and log_model:
            raise ValueError(
                f"WandbLogger(offline=True, log_model={log_model!r}): checkpoints can't be uploaded offline; set "
                "log_model=False"
            )
        self._project = project or os.environ.get("WANDB_PROJECT", "lightning_logs")
        self._name, self._dir, self._id = name, save_dir or dir, version or id or new_id()
        self._init = {
            **({"mode": "offline"} if offline else {}), **({"anonymous": "allow"} if anonymous else {}), **kwargs
        }  # fmt: skip
        self._prefix, self._artifact, self._policy = prefix, checkpoint_name, add_file_policy
        self._uploads = Uploads(log_model)
        super().__init__(experiment)

    def _start(self, run_dir: Path) -> Any:
        arguments: dict[str, Any] = {
            "project": self._project, "name": self._name or run_dir.name, "id": self._id, "resume": "allow",
            "dir": str(self._dir or run_dir),
        }  # fmt: skip
        Path(arguments["dir"]).mkdir(parents=True, exist_ok=True)
        run = client("wandb").init(**{**arguments, **self._init})
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
        return run

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        if self._run is not None:
            at = {} if step is None else {"trainer/global_step": step}
            self._run.log({**prefixed(metrics, self._prefix), **at})

    def log_hyperparams(self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None) -> None:
        if self._run is not None:
            self._run.config.update(parameters(params), allow_val_change=True)

    def log_text(  # type: ignore[override]
        self, key: str, text: Any = None, step: int = 0, *, columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None, dataframe: Any = None,
    ) -> None:  # fmt: skip
        """Save a text as a file of the run, or log a table.

        Args:
            key: name of the text or the table.
            text: text to save; None for a table.
            step: weight updates so far.
            columns, data, dataframe: content of a table.
        """
        if text is None or columns is not None or data is not None or dataframe is not None:
            self.log_table(key, columns, data, dataframe, step or None)
        elif self._run is not None:
            file = Path(self._run.dir) / f"{key.replace('/', '_')}.txt"
            with file.open("a") as opened:
                opened.write(f"{text}\n")

    def log_table(
        self, key: str, columns: Sequence[str] | None = None, data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None, step: int | None = None,
    ) -> None:  # fmt: skip
        """Log a table.

        Args:
            key: its name.
            columns, data, dataframe: its content.
            step: weight updates so far.
        """
        if self._run is not None:
            table = client("wandb").Table(columns=columns, data=data, dataframe=dataframe)
            self._log_media({key: table}, step)

    def log_image(self, key: str, images: Sequence[Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images.

        Args:
            key: their name.
            images: images of wandb, arrays, or paths.
            step: weight updates so far.
            **kwargs: of `wandb.Image`, with a list of a value for each image, such as `caption`.
        """
        if self._run is None:
            return
        image, options = client("wandb").Image, [{} for _ in images] if not kwargs else _each(kwargs, len(images))
        self._log_media({key: [image(item, **option) for item, option in zip(images, options, strict=True)]}, step)

    def _log_media(self, values: dict[str, Any], step: int | None) -> None:
        self._run.log({**values, **({} if step is None else {"trainer/global_step": step})})

    def watch(self, model: Any, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Log gradients or parameters of a module; call it in a hook of the run, such as `on_train_start`.

        Args:
            model: the module.
            log, log_freq, log_graph: of `wandb.watch`.
        """
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def checkpoints_saved(self, kept: list[str]) -> None:
        self._upload(self._uploads.after_save(kept))

    def _upload(self, paths: Sequence[str]) -> None:
        for path in paths:
            artifact = client("wandb").Artifact(name=self._artifact or f"model-{self._id}", type="model")
            add = artifact.add_file if Path(path).is_file() else artifact.add_dir
            add(path, policy=self._policy)
            self._run.log_artifact(artifact, aliases=["latest", Path(path).stem.replace("=", "_")])

    def _finish(self, status: Ending) -> None:
        self._upload(self._uploads.at_end())

    def _end(self, run: Any, status: Ending) -> None:
        run.finish(exit_code=0 if status == "success" else 1)

    @property
    def name(self) -> str:
        return self._project

    @property
    def version(self) -> str:
        return self._id


def _each(options: Mapping[str, Sequence[Any]], count: int) -> list[dict[str, Any]]:
    """Return the options of each image.

    Raises:
        ValueError: an option has not one value for each image.
    """
    for name, values in options.items():
        if len(values) != count:
            raise ValueError(f"log_image({name}=...): {len(values)} values for {count} images")
    return [{name: values[number] for name, values in options.items()} for number in range(count)]
