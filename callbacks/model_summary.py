"""Print a table of a module's submodules and parameters."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fabricx.callbacks.forward_sizes import UNKNOWN, forward_sizes
from fabricx.core.callback import Callback
from fabricx.core.hook_calls.former_names import renamed
from fabricx.core.tensors.transfer import to_device

if TYPE_CHECKING:
    from fabricx.core.module import Module
    from fabricx.core.trainer import TrainerProtocol

_COLUMNS = ("", "Name", "Type", "Params", "Size")
_SIZES = ("In sizes", "Out sizes")  # columns of a module with an example input


@dataclass(frozen=True)
class Row:
    """Row of the table.

    Attributes:
        name: of the submodule.
        kind: its class.
        parameters: their number; None without a shape yet.
        size: bytes of parameters and buffers.
        training: the submodule is in training mode.
        in_size, out_size: shapes of its first input and output, as lists; "?" if they are unknown.
    """

    name: str
    kind: str
    parameters: int | None
    size: int
    training: bool = True
    in_size: Any = UNKNOWN
    out_size: Any = UNKNOWN

    def cells(self) -> tuple[str, ...]:
        """Return the formatted cells."""
        count = "?" if self.parameters is None else readable(self.parameters)
        return self.name, self.kind, count, _bytes(self.size)


@dataclass(frozen=True)
class Summary:
    """Parameter counts of a module; `str(summary)` is a table.

    Attributes:
        rows: the submodules, in the module's order.
        trainable: elements of parameters with `requires_grad`; shared parameters count once.
        frozen: elements of parameters without `requires_grad`.
        size: bytes of all parameters and buffers.
        unknown: number of lazy parameters, which have no shape before the first batch.
        sized: rows have the shapes of inputs and outputs.
        modes: numbers of submodules in training mode and in evaluation mode.
        named_modules: the submodules of the rows, by name.
    """

    rows: tuple[Row, ...]
    trainable: int
    frozen: int
    size: int
    unknown: int = 0
    sized: bool = False
    modes: tuple[int, int] = (0, 0)
    named_modules: list[tuple[str, nn.Module]] = field(default_factory=list, repr=False, compare=False)

    @property
    def total(self) -> int:
        """Return the number of parameters, trainable and frozen."""
        return self.trainable + self.frozen

    @property
    def total_parameters(self) -> int:
        """Return the number of parameters, under Lightning's name; warn of those without a shape."""
        if self.unknown:
            warnings.warn(
                f"{self.unknown} lazy parameters have no shape before the first batch: the total number of parameters "
                "may be inaccurate",
                stacklevel=2,
            )
        return self.total

    @property
    def trainable_parameters(self) -> int:
        """Return the number of trainable parameters, under Lightning's name."""
        return self.trainable

    @property
    def model_size(self) -> float:
        """Return the size of the parameters and buffers in MB, under Lightning's name."""
        return self.size / 1e6

    @property
    def layer_names(self) -> list[str]:
        """Return the names of the submodules, under Lightning's name."""
        return [row.name for row in self.rows]

    @property
    def layer_types(self) -> list[str]:
        """Return the classes of the submodules."""
        return [row.kind for row in self.rows]

    @property
    def param_nums(self) -> list[int]:
        """Return the numbers of parameters of the submodules; 0 for one without a shape yet."""
        return [row.parameters or 0 for row in self.rows]

    @property
    def total_layer_params(self) -> int:
        """Return the sum of the numbers of parameters of the submodules."""
        return sum(self.param_nums)

    @property
    def in_sizes(self) -> list[Any]:
        """Return the shapes of the inputs of the submodules; "?" without an example input."""
        return [row.in_size for row in self.rows]

    @property
    def out_sizes(self) -> list[Any]:
        """Return the shapes of the outputs of the submodules; "?" without an example input."""
        return [row.out_size for row in self.rows]

    @property
    def training_modes(self) -> list[bool]:
        """Return whether each submodule is in training mode."""
        return [row.training for row in self.rows]

    @property
    def total_training_modes(self) -> dict[str, int]:
        """Return the numbers of submodules in training mode and in evaluation mode, of any depth."""
        return dict(zip(("train", "eval"), self.modes, strict=True))

    @property
    def columns(self) -> tuple[str, ...]:
        """Return the heads of the columns."""
        return (*_COLUMNS, *(_SIZES if self.sized else ()))

    def cells(self) -> list[tuple[str, ...]]:
        """Return the formatted cells of each row."""
        sizes = [(str(row.in_size), str(row.out_size)) if self.sized else () for row in self.rows]
        return [(str(number), *row.cells(), *sizes[number]) for number, row in enumerate(self.rows)]

    def totals(self) -> str:
        """Return the lines below the table."""
        lines = [
            f"{readable(self.trainable):<10} trainable parameters",
            f"{readable(self.frozen):<10} non-trainable parameters",
            f"{readable(self.total):<10} in total",
            f"{_bytes(self.size):<10} estimated size of the weights",
        ]
        if self.unknown:
            lines.append(f"{self.unknown:<10} parameters have no shape before the first batch and are not counted")
        return "\n".join(lines)

    def __str__(self) -> str:
        table = [self.columns, *self.cells()]
        widths = [max(len(line[column]) for line in table) for column in range(len(self.columns))]
        lines = [" | ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
        body = [lines[0], rule, *lines[1:], rule] if self.rows else []
        return "\n".join([*body, self.totals()])


def summarize(
    module: nn.Module, max_depth: int = 1, *, forward: Callable[..., Any] | None = None, example: Any = None
) -> Summary:
    """Count the parameters of a module and of its submodules.

    With an example input, the forward runs once for the shapes of inputs and outputs.

    Args:
        module: any module; lazy parameters are not counted until they have a shape.
        max_depth: depth of the rows: 1 shows direct children, 0 totals only, -1 all submodules.
        forward: computes the example; None for the module, and its `example_input_array` on the module's device.
        example: on the device; None for no forward, if `forward` is given.

    Raises:
        ValueError: `max_depth` is below -1.
    """
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ValueError(f"ModelSummary(max_depth={max_depth!r}): must be -1 (everything), 0 (totals only), 1, 2, ...")
    parameters = list(module.parameters())
    shaped = [parameter for parameter in parameters if not is_lazy(parameter)]
    if forward is None:
        forward, example = module, getattr(module, "example_input_array", None)
        example = to_device(example, shaped[0].device) if shaped and example is not None else example
    sized = example is not None and len(shaped) == len(parameters)
    sizes = forward_sizes(module, example, forward) if sized else {}
    parts = [
        (name, part)
        for name, part in module.named_modules()
        if name and (max_depth == -1 or name.count(".") < max_depth)
    ]
    rows = tuple(_row(name, part, *sizes.get(name, (UNKNOWN, UNKNOWN))) for name, part in parts)
    modes = [part.training for part in module.modules()][1:]
    buffers = [buffer for buffer in module.buffers() if not is_lazy(buffer)]
    return Summary(
        rows=rows,
        trainable=sum(parameter.numel() for parameter in shaped if parameter.requires_grad),
        frozen=sum(parameter.numel() for parameter in shaped if not parameter.requires_grad),
        size=_size([*shaped, *buffers]),
        unknown=len(parameters) - len(shaped),
        sized=sized,
        modes=(sum(modes), len(modes) - sum(modes)),
        named_modules=parts,
    )


def _row(name: str, part: nn.Module, in_size: Any, out_size: Any) -> Row:
    parameters = list(part.parameters())
    lazy = any(is_lazy(parameter) for parameter in parameters)
    shaped = [tensor for tensor in (*parameters, *part.buffers()) if not is_lazy(tensor)]
    count = None if lazy else sum(parameter.numel() for parameter in parameters)
    return Row(name, type(part).__name__, count, _size(shaped), part.training, in_size, out_size)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def readable(count: int) -> str:
    """Format a count for display: with one decimal and a unit (K, M, B or T) from 1,000 on.

    Args:
        count: any number of parameters.

    >>> readable(999), readable(12_345), readable(1_234_567)
    ('999', '12.3 K', '1.2 M')
    """
    amount = float(count)
    for unit in ("", " K", " M", " B"):
        if amount < 1000:
            return f"{amount:.1f}{unit}" if unit else str(count)
        amount /= 1000
    return f"{amount:,.1f} T"


def _bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} GB"


class ModelSummary(Callback):
    """Print the module's submodules and parameter counts when training begins, on the main rank.

    With a single rank and an `example_input_array` of the module, also the shapes of inputs and outputs.

    Args:
        max_depth: depth of the table: 1 shows direct children, 0 totals only, -1 all submodules.

    Raises:
        ValueError: `max_depth` is below -1.
    """

    sees_whole_weights = True
    former_methods: ClassVar = renamed("summarize _summary", "on_fit_start(self, trainer, module), which prints it")

    def __init__(self, max_depth: int = 1) -> None:
        summarize(nn.Module(), max_depth)  # report an invalid depth now, not when training begins
        self.max_depth = max_depth

    def on_fit_start(self, trainer: TrainerProtocol, pl_module: Module) -> None:
        if not trainer.world.main_rank:
            return
        # The forward of a divided model needs all ranks, and this is the main rank only.
        example = getattr(pl_module, "example_input_array", None) if trainer.world.size == 1 else None
        if example is not None:
            convert = trainer.session.precision.convert_batch()
            example = to_device(example, trainer.session.world.device)
            example = example if convert is None else convert(example)

        def forward(*args: Any, **options: Any) -> Any:
            return trainer.session.precision.wrap_step(functools.partial(pl_module, **options))(*args)

        summary = summarize(pl_module, self.max_depth, forward=forward, example=example)
        if sys.stdout.isatty():
            _print_table(summary)
        else:
            trainer.print(str(summary))


@final
class RichModelSummary(ModelSummary):
    """The summary with the arguments of Lightning's `RichModelSummary`; it prints the same as `ModelSummary`.

    Args:
        max_depth: depth of the table: 1 shows direct children, 0 totals only, -1 all submodules.
        **summarize_kwargs: without effect; styles of the table in Lightning.

    Raises:
        ValueError: `max_depth` is below -1.
    """

    def __init__(self, max_depth: int = 1, **summarize_kwargs: Any) -> None:
        super().__init__(max_depth)


def _print_table(summary: Summary) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if summary.rows:
        table = Table(*summary.columns)
        for column in (0, 3, 4):
            table.columns[column].justify = "right"
        for cells in summary.cells():
            table.add_row(*cells)
        console.print(table)
    console.print(summary.totals(), highlight=False)
