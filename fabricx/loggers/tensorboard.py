"""Logger that writes metrics, hyperparameters, texts and the graph for TensorBoard."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn

from fabricx.core.logger import Ending
from fabricx.core.module_state.evaluation_mode import evaluation_mode
from fabricx.core.module_state.rng import random_kept
from fabricx.loggers.files import (
    UPDATES,
    FolderLogger,
    LoggerFolder,
    by_name,
    of_open_logger,
    prefixed,
    with_updates,
    write_hyperparameters,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_SESSION: Final = ".hparams"  # suffix of the file with the HPARAMS session


class TensorBoardLogger(FolderLogger["SummaryWriter"]):
    """Write an event file and `hparams.yaml`; `tensorboard --logdir runs` shows all runs by the names of their folders.

    Where the step of values is one that the module has logged, or an evaluation batch, `weight_updates` is a chart.
    At the end of the run, hyperparameters are written with the last value of every metric and the status of the run,
    for TensorBoard's HPARAMS page.

    Args:
        save_dir: parent folder; default: the run's folder.
        name: subfolder of `save_dir`.
        version: subfolder of `name`; default with a `save_dir`: the next of "version_0", "version_1", ...
        log_graph: also write the module's graph, traced with its `example_input_array`.
        default_hp_metric: without an effect; the HPARAMS page has the last value of every metric.
        prefix: prefix of the names of metrics.
        sub_dir: subfolder below the version.
        **kwargs: of `torch.utils.tensorboard.SummaryWriter`, such as `flush_secs`.
    """

    shows_telemetry: ClassVar[bool] = True
    NAME_HPARAMS_FILE: ClassVar[str] = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        version: int | str | None = None,
        log_graph: bool = False,
        default_hp_metric: bool = True,
        prefix: str = "",
        sub_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(LoggerFolder(save_dir, name, version, sub_dir))
        self._prefix, self._options = prefix, kwargs
        self._graph_enabled = log_graph
        self._folder: Path | None = None
        self._params: dict[str, float | str] = {}
        self._hparams: dict[str, Any] = {}
        self._final: dict[str, float] = {}
        self._kept: list[tuple[int, str, float]] = []  # rows of the step that a rollback returned to

    def _start(self, folder: Path) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        if folder != self._folder:
            self._params = {}
        self._folder, self._final, self._kept = folder, {}, []
        return SummaryWriter(log_dir=str(folder), **self._options)

    @of_open_logger
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = 0) -> None:
        step = step or 0
        if self._writer is None:
            return
        metrics = prefixed(metrics, self._prefix)
        for name in [name for name, value in metrics.items() if isinstance(value, Mapping)]:
            self._writer.add_scalars(name, metrics.pop(name), step)
        for name, value in with_updates(metrics, self.updates_of_row).items():
            if self._kept and (row := (step, name, _single(value))) in self._kept:
                self._kept.remove(row)  # already written: callbacks after the checkpoint repeat it
                continue
            self._writer.add_scalar(name, value, step)
        self._final.update(metrics)

    def rewind(self, step: int) -> None:
        from tensorboard.compat.proto import event_pb2

        if self._writer is not None and self._folder is not None:
            self._writer.flush()
            updates = _updates_of(self._folder)
            before = [step, *(number for number, update in updates.items() if update <= step)]
            self._kept = _rows_of(self._folder, {step} | {row for row, update in updates.items() if update == step})
            # A START event makes TensorBoard discard earlier events with its step and later steps.
            messages: Any = event_pb2  # generates its classes at run time
            began = messages.SessionLog(status=messages.SessionLog.START)
            self._writer._get_file_writer().add_event(messages.Event(step=max(before) + 1, session_log=began))  # type: ignore[no-untyped-call]

    @property
    def hparams(self) -> dict[str, Any]:
        """Return the logged hyperparameters, nested as they were passed."""
        return self._hparams

    def log_hyperparams(
        self, params: Mapping[str, Any], metrics: Mapping[str, float] | None = None, step: int | None = None
    ) -> None:
        self._hparams.update(by_name(params))
        if self._writer is None:
            self._keep(by_name(params), self.NAME_HPARAMS_FILE)
            return
        self._params.update(flatten(by_name(params)))
        if self._folder is not None and params:
            write_hyperparameters(self._folder / self.NAME_HPARAMS_FILE, by_name(params))
        for name, value in (metrics or {}).items():
            if name not in self._final:
                self._writer.add_scalar(name, value, step or 0)  # the HPARAMS page reads values from the charts
                self._final[name] = value

    @of_open_logger
    def log_text(self, name: str, text: str, step: int = 0) -> None:
        if self._writer is not None:
            self._writer.add_text(name, f"```\n{text}\n```", step)

    def log_graph(self, module: nn.Module, example: object = None) -> None:
        """Write the graph of the module if the logger has `log_graph=True`; warn if it cannot be traced.

        Args:
            module: the module to trace.
            example: input of the module; None for its `example_input_array`.
        """
        if self._writer is None or not self._graph_enabled:
            return
        example = getattr(module, "example_input_array", None) if example is None else example
        if example is None:
            warnings.warn(
                f"no graph: {type(module).__name__} has no example_input_array; set it to an input of the module",
                stacklevel=2,
            )
            return
        try:
            with evaluation_mode(module), random_kept(), torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tracing causes warnings
                self._writer.add_graph(module, example)
        except Exception as error:  # a missing graph must not end the run
            warnings.warn(f"no graph: {type(module).__name__} can't be traced: {error}", stacklevel=2)

    def _finish(self, status: Ending) -> None:
        if self._folder is not None:
            self._write_session(self._folder, status)

    def _write_session(self, folder: Path, status: Ending) -> None:
        """Write the HPARAMS session, or add the metrics of a test after the run to the session of the run.

        TensorBoard uses the first session that a folder's files contain, and stops reading a file when it finds a later
        one. The session is therefore a file of its own, which a later session replaces. `add_hparams` would repeat the
        scalars, which would distort the charts, and has no status.
        """
        from tensorboard.plugins.hparams import api_pb2
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        earlier = sorted(folder.glob(f"events.out.tfevents.*{_SESSION}"))
        metrics = {name: value for name, value in self._final.items() if name != "epoch"}
        written = _summaries(earlier[-1]) if earlier else []
        if self._params:
            summaries = list(hparams(self._params, {**_metrics_of(written), **metrics}))  # type: ignore[no-untyped-call]
            if status != "success":
                _set_status(summaries[-1], api_pb2.STATUS_FAILURE)  # pyright: ignore[reportAttributeAccessIssue]
        elif written and metrics.keys() - _metrics_of(written).keys():
            summaries = [_with_metrics(written[0], metrics), *written[1:]]
        else:
            return
        newest = max(path for path in folder.glob("events.out.tfevents.*") if path.suffix != _SESSION)
        writer = SummaryWriter(log_dir=str(folder), filename_suffix=_SESSION)
        for summary in summaries:
            writer._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]
        writer.close()
        [fresh] = set(folder.glob(f"events.out.tfevents.*{_SESSION}")) - set(earlier)
        fresh.replace(newest.with_name(newest.name + _SESSION))  # TensorBoard reads files in the order of their names
        for path in earlier:
            if path.name != newest.name + _SESSION:
                path.unlink()


def flatten(params: Mapping[str, Any], prefix: str = "") -> dict[str, float | str]:
    """Flatten nested hyperparameters for TensorBoard, which supports a single level of numbers and text.

    Args:
        params: hyperparameters by name.
        prefix: prefix of all names.

    >>> flatten({"lr": 0.1, "net": {"sizes": [8, 4], "bias": None}})
    {'lr': 0.1, 'net/sizes': '[8, 4]', 'net/bias': 'None'}
    """
    flat: dict[str, float | str] = {}
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}/")
        else:
            flat[name] = value if isinstance(value, (bool, int, float, str)) else str(value)
    return flat


def _single(value: float) -> float:
    """Round a number to the precision of event files, float32."""
    return torch.tensor(value, dtype=torch.float32).item()


def _updates_of(folder: Path) -> dict[int, float]:
    """Return the weight updates at rows whose step is another number, by step."""
    events = _events(folder, [UPDATES.encode()])
    return {e.step: value.simple_value for e in events for value in e.summary.value if value.tag == UPDATES}


def _rows_of(folder: Path, steps: Set[int]) -> list[tuple[int, str, float]]:
    """Return the values of steps in the event files of a folder: (step, name, value)."""
    from tensorboard.compat.proto import event_pb2

    messages: Any = event_pb2
    of_steps = [messages.Event(step=step).SerializeToString() for step in steps]
    of_start = messages.Event(session_log=messages.SessionLog(status=messages.SessionLog.START)).SerializeToString()
    rows: list[tuple[int, str, float]] = []
    for event in _events(folder, [*of_steps, of_start]):
        if event.HasField("session_log"):
            rows = [row for row in rows if row[0] < event.step]  # a rollback discards the values before
        if event.step in steps:
            rows += [(event.step, v.tag, v.simple_value) for v in event.summary.value if v.HasField("simple_value")]
    return rows


def _events(folder: Path, texts: Sequence[bytes]) -> Iterator[Any]:
    """Yield the events of a folder; only those that contain one of these bytes, when serialized, are parsed."""
    from tensorboard.compat.proto import event_pb2

    messages: Any = event_pb2
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in _records(path.read_bytes()):
            if any(text in record for text in texts):
                yield messages.Event.FromString(record)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an event file, up to a record that is incomplete.

    A record consists of its length (8 bytes), a checksum (4 bytes), the data, and a checksum (4 bytes). TensorBoard's
    reader is 10 times slower, because it verifies the checksums.
    """
    begin = 12
    while begin <= len(data):
        end = begin + int.from_bytes(data[begin - 12 : begin - 4], "little")
        if end + 4 > len(data):
            return
        yield data[begin:end]
        begin = end + 16


def _summaries(path: Path) -> list[Any]:
    """Return the summaries in an event file; the first of an HPARAMS session describes its metrics."""
    from tensorboard.compat.proto import event_pb2

    messages: Any = event_pb2
    events = [messages.Event.FromString(record) for record in _records(path.read_bytes())]
    return [event.summary for event in events if event.HasField("summary")]


def _metrics_of(summaries: Sequence[Any]) -> dict[str, float]:
    """Return the names of the metrics of an HPARAMS session, with a value that stands for all."""
    return {info.name.tag: 0.0 for info in _content(summaries[0]).experiment.metric_infos} if summaries else {}


def _with_metrics(experiment: Any, names: Iterable[str]) -> Any:
    """Return the first summary of an HPARAMS session with further metrics."""
    content = _content(experiment)
    known = {info.name.tag for info in content.experiment.metric_infos}
    for name in names:
        if name not in known:
            content.experiment.metric_infos.add().name.tag = name
    experiment.value[0].metadata.plugin_data.content = content.SerializeToString()
    return experiment


def _content(summary: Any) -> Any:
    from tensorboard.plugins.hparams import plugin_data_pb2

    messages: Any = plugin_data_pb2
    return messages.HParamsPluginData.FromString(summary.value[0].metadata.plugin_data.content)


def _set_status(end: Any, status: int) -> None:
    content = _content(end)
    content.session_end_info.status = status
    end.value[0].metadata.plugin_data.content = content.SerializeToString()
