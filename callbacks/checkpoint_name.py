"""Format the name of a checkpoint from a template and metrics."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, final

from fabricx.callbacks.checkpoint_files import Suffixes
from fabricx.checkpoint.storage import as_path
from fabricx.errors import did_you_mean

_FIELD: Final = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


@final
@dataclass(frozen=True)
class CheckpointNames:
    """Names of the checkpoints of a run, without folder and extension.

    Attributes:
        template: template of ranked checkpoints; None for "{epoch}-{step}".
        last: template of the link's name.
        join: text between the parts of a name.
        equals: text between the name and the value of a metric.
        insert: insert the names of metrics before their values.
    """

    template: str | None
    last: str = "last"
    join: str = "-"
    equals: str = "="
    insert: bool = True

    def ranked(self, metrics: Mapping[str, float]) -> str:
        """Return the name of a checkpoint.

        >>> CheckpointNames(None).ranked({"epoch": 1, "step": 8})
        'epoch=1-step=8'

        Args:
            metrics: values by name.
        """
        return self._format(self.template or f"{{epoch}}{self.join}{{step}}", metrics)

    def warn_of_absent(self, metrics: Mapping[str, float]) -> None:
        """Warn of a field of the template without a metric of its name, such as a misspelt name.

        Args:
            metrics: values by name.
        """
        for name in (field[1] for field in _FIELD.finditer(self.template or "")):
            if name not in metrics:
                warnings.warn(
                    f"ModelCheckpoint(filename={self.template!r}): there is no metric {name!r} yet, so the name "
                    f"of the file has nan in its place.{did_you_mean(name, metrics)}",
                    stacklevel=2,
                )

    def unranked(self, reason: str, metrics: Mapping[str, float]) -> str:
        """Return the name of a checkpoint that is saved for another reason than its metric.

        Args:
            reason: part of the name, unless the user has set a template.
            metrics: values by name.
        """
        name = self.ranked(metrics)
        return f"{reason}{self.join}{name}" if self.template is None else name

    def link(self, metrics: Mapping[str, float]) -> str:
        """Return the name of the link to the newest checkpoint.

        Args:
            metrics: values by name.
        """
        return self._format(self.last, metrics)

    def _format(self, template: str, metrics: Mapping[str, float]) -> str:
        return format_name(template, metrics, self.insert, self.equals)


def format_name(
    template: str, metrics: Mapping[str, float], auto_insert: bool = True, equals: str = "="
) -> str:  # fmt: skip
    """Replace the fields of a template by values.

    >>> format_name("{epoch}-{step}-{val_loss:.2f}", {"epoch": 3, "step": 40, "val_loss": 0.1234})
    'epoch=3-step=40-val_loss=0.12'
    >>> format_name("best-{epoch:02d}", {"epoch": 3}, auto_insert=False)
    'best-03'

    Args:
        template: text with fields `{name}` or `{name:format}`; `name` is a logged metric, "epoch" or "step".
        metrics: values by name; a missing name becomes "nan".
        auto_insert: insert "name=" before each value. A "/" in the name becomes "_", because it would create a folder.
        equals: text between the name and the value.

    Raises:
        ValueError: a format specification is invalid for numbers.
    """

    def fill(field: re.Match[str]) -> str:
        name, spec = field[1], field[2] or ""
        text = _format_value(metrics.get(name, math.nan), name, spec)
        return f"{name.replace('/', '_')}{equals}{text}" if auto_insert else text

    return _FIELD.sub(fill, template)


def _format_value(value: float, name: str, spec: str) -> str:
    try:
        if isinstance(value, int):
            return format(value, spec)
        if not math.isfinite(value):
            return str(value)
        return format(int(value) if spec.endswith("d") else value, spec or ".6g")
    except ValueError:
        raise ValueError(
            f"the checkpoint's file name has the field {{{name}:{spec}}}, and {spec!r} is not a format of numbers; "
            'use a format such as ".2f" or "03d"'
        ) from None


class NameParts:
    """Parts of the names of checkpoints, which a user sets on `ModelCheckpoint` or on an object, before the run."""

    CHECKPOINT_NAME_LAST: str = "last"  # template of the link's name, such as "{epoch}-last"
    CHECKPOINT_JOIN_CHAR: str = "-"  # between the parts of the default name
    CHECKPOINT_EQUALS_CHAR: str = "="  # between the name and the value of a metric
    FILE_EXTENSION: str = ".ckpt"
    STARTING_VERSION: int = 1  # of the first name that exists already

    if TYPE_CHECKING:  # set by `ModelCheckpoint`
        filename: str | None
        dirpath: str | None
        auto_insert_metric_name: bool

    def __getstate__(self) -> dict[str, Any]:
        # A worker imports the class without the assignments to its attributes.
        parts = {name: getattr(self, name) for name, default in _DEFAULTS.items() if getattr(self, name) != default}
        return parts | self.__dict__

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the path of a checkpoint with given metrics.

        Args:
            metrics: values by name, with "epoch" and "step".
            filename: template of the name; None for that of this callback.
            ver: number of a version, for a name that exists.
            prefix: text before the name.
        """
        numbers = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
        known = {"epoch": 0, "step": 0, **numbers}
        name = replace(self._names, template=filename or self.filename).ranked(known)
        name = f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}" if prefix else name
        name += ("" if ver is None else f"{self._suffixes.version}{ver}") + self.FILE_EXTENSION
        return str(as_path(self.dirpath) / name) if self.dirpath else name

    @property
    def _names(self) -> CheckpointNames:
        return CheckpointNames(
            self.filename, self.CHECKPOINT_NAME_LAST, self.CHECKPOINT_JOIN_CHAR, self.CHECKPOINT_EQUALS_CHAR,
            insert=self.auto_insert_metric_name,
        )  # fmt: skip

    @property
    def _suffixes(self) -> Suffixes:
        return Suffixes(self.FILE_EXTENSION, f"{self.CHECKPOINT_JOIN_CHAR}v", self.STARTING_VERSION)


_DEFAULTS: Final = {name: value for name, value in vars(NameParts).items() if name.isupper()}
