"""The contract of a strategy: training of one module by one or several ranks."""

from __future__ import annotations

import warnings
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabricx.core.averaging import AverageRule
from fabricx.distributed.world import World
from fabricx.errors import NamesChecked

ReduceOp = Literal["sum", "max", "min"]
OTHER_STATE = (
    "Go on with what the checkpoint was written with; or convert checkpoint in on_load_checkpoint; or begin a new run "
    "with its weights: Module.load_from_checkpoint(path), and fit without ckpt_path"
)
SPARSE_CLIPPED = "torch clips no sparse gradients: say sparse=False, or clip the others in configure_gradient_clipping"


@dataclass(frozen=True)
class Traits:
    """What a strategy promises; the loop asks for these and never for the strategy's name.

    Attributes:
        synchronous: all ranks hold the same weights after a step.
        sharded: a rank holds only a part of the weights or of the optimizer's state.
        private: nor is all of it in what another rank holds: a server has some, or each rank has its own.
        elastic: the world may change under it.
        joins: a checkpoint brings ranks to one state, from which they go on otherwise than without it.
        max_ranks: the most ranks it can run on; None for any number.
    """

    synchronous: bool = True
    sharded: bool = False
    private: bool = False
    elastic: bool = False
    joins: bool = False
    max_ranks: int | None = None

    @property
    def alike(self) -> bool:
        """Return whether each rank holds the whole state, and all the same."""
        return self.synchronous and not self.sharded and not self.private


class Strategy(NamesChecked, ABC):
    """Trains one module on a `World` of ranks. The defaults here are those of a single rank.

    A strategy is a plain, picklable description until `setup`: it is made in the caller's process and set up in each
    worker, where the process group is joined already. The loop divides the loss by the samples of the whole global
    batch; what the ranks' gradients have to be multiplied with so that the strategy ends up with their sum is
    `gradient_factor`.
    """

    traits: Traits = Traits()
    servers = 0  # processes that it needs beside the ranks
    link = ""  # between workers and servers, "auto" or "gloo"; "" for a strategy whose ranks use collectives only
    waited_s = 0.0  # seconds that this rank has waited for others while it computed and updated, if they are counted
    waits_for_servers = False  # those are whom it waits for
    pushed_s = 0.0  # seconds in which it has given gradients to them
    norm_clipping_refused = ""  # why the norm of a gradient can't be limited; "" where it can
    batch_weight_refused = ""  # why `Module.batch_weight` can't count in the mean over ranks; "" where it can
    closes = True  # does the next backward end an accumulation window?
    weights_brought: int | None = None  # how often weights came from servers; None where this rank has its own
    steps_globally = True  # an update is of a global batch; else of the batch of one rank
    parts = 0  # that each global batch is cut into, whoever computes them; 0 for as many as there are ranks

    def __init__(self) -> None:
        self.world = World()
        self.module: nn.Module | None = None

    @property
    def pushes(self) -> deque[tuple[int, int, float]]:
        """Return the newest gradients that it has given to servers: by which worker, which of its, and when."""
        return deque()

    # -- set up -------------------------------------------------------------------------------------------------

    def enter(self, world: World) -> None:
        """Take this rank's place in a world; for every stage, also where nothing is trained."""
        self.world = world

    def building(self) -> AbstractContextManager[Any]:
        """Return a context for `configure_model`, such as one in which weights take no memory yet."""
        return nullcontext()

    def place(self, module: nn.Module) -> None:
        """Bring a module to this rank's device; for every stage, before anything is computed with it."""
        self.module = module
        module.to(self.world.device)

    def setup(self, module: nn.Module, *, several_backwards: bool = False) -> None:
        """Wrap or shard the module for training, and agree on the first weights; it is on its device already.

        Args:
            module: the user's module.
            several_backwards: one step may call `backward` several times, each reaching other parameters (manual
                optimization).
        """
        self.module = module

    def take_over(self, optimizers: list[Optimizer]) -> None:
        """Get to know the user's optimizers; training hasn't begun, and a checkpoint may still be loaded."""

    def starts(self, step: int, ranks: int) -> None:
        """Begin to train; what a checkpoint holds has been loaded.

        Args:
            step: updates that have been made.
            ranks: that the run began with: the global batch is theirs.
        """

    def wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return the callable that the loop calls instead of the module's own training step."""
        return step

    def teardown(self) -> None:
        """Give back what `setup` took; the module stays usable."""
        self.module = None

    def world_changed(self, world: World) -> None:
        """Go on with other members; only strategies with `traits.elastic` are asked to."""
        raise NotImplementedError(f"{type(self).__name__} can't go on with another number of ranks")

    # -- one step -----------------------------------------------------------------------------------------------

    @property
    def gradient_factor(self) -> float:
        """Return what turns a share of the global mean into this rank's loss: ranks, where gradients are averaged."""
        return 1.0

    def accumulate(self) -> AbstractContextManager[Any]:
        """Return a context for microbatches that don't end a window: no gradient has to travel yet."""
        return self._window_goes_on()

    def forget_window(self) -> None:
        """Forget what microbatches have given whose window will not be closed, but for the parameters' gradients."""

    @contextmanager
    def _window_goes_on(self) -> Iterator[None]:
        self.closes = False
        try:
            yield
        finally:
            self.closes = True

    def backward(self, loss: Tensor, compute: Callable[[], None] | None = None) -> None:
        """Compute gradients; after the last microbatch of a window they are the global mean.

        Args:
            loss: of this rank, scaled by its share of the global batch and by `gradient_factor`.
            compute: what to call instead of `loss.backward`.
        """
        (compute or loss.backward)()

    def backward_nothing(self, *company: Any) -> bool:
        """Take part in the others' `backward` without a sample of one's own: contribute zero.

        Args:
            company: what the step can be called with, where somebody else's sample is at hand: (batch, index).

        Returns:
            whether this rank was in the others' backward, so that all ranks have come this far.
        """
        return True

    def forward_nothing(self) -> None:
        """Take part in the others' forward, of a microbatch after which no gradients travel, without a sample."""
        return

    def settle_trained(self) -> None:
        """Let parameters that hooks have frozen, or released, be so wherever this rank keeps them."""
        return

    def clip_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Scale gradients down to a 2-norm of at most `max_norm`, over all ranks; returns the norm before."""
        try:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        except NotImplementedError as error:
            raise ValueError(SPARSE_CLIPPED) from error

    def gradient_norm(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Return the 2-norm of the gradient that was used last; every rank calls it. None where it isn't here."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None and not p.grad.is_sparse]
        if not gradients:
            return None
        norm: Any = nn.utils.get_total_norm(gradients)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def clip_value(self, parameters: Iterable[Tensor], limit: float) -> None:
        """Cut each element of the gradients to [-limit, limit]."""
        try:
            nn.utils.clip_grad_value_(parameters, limit)
        except NotImplementedError as error:
            raise ValueError(SPARSE_CLIPPED) from error

    def step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights."""
        return optimizer.step(closure) if closure is not None else optimizer.step()

    def hooks_see_gradients(self) -> AbstractContextManager[Any]:
        """Return a context for hooks between backward and update: gradients are the global mean, or can't be read."""
        return nullcontext()

    @property
    def hides_gradients(self) -> bool:
        """Return whether hooks cannot read the gradient of an update: each rank has only its part of the sum."""
        return False

    def nonfinite_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the parameters whose gradient on this rank has NaN or infinity; where it is a part, of that part.

        Args:
            parameters: of optimizers, before they step; also in hooks that cannot read the gradients.
        """
        return [p for p in parameters if p.grad is not None and not _finite(p.grad)]

    def drop_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Let the update that follows leave parameters as they are; all ranks of a synchronous strategy call it."""
        for parameter in parameters:
            parameter.grad = None

    def updated(self, step: int) -> int:
        """Do what comes after an update, once all optimizers have stepped.

        Args:
            step: how many updates there were, by this rank's reckoning.

        Returns:
            how many there really were, where others update the same weights.
        """
        return step

    def weights_step(self, step: int) -> int:
        """Wait until no weights are on their way to this rank, and return how many updates are in those it has.

        Args:
            step: how many there were, by this rank's reckoning.
        """
        return step

    def keep_average(self, rule: AverageRule, step: int, averages: Mapping[str, Tensor]) -> frozenset[str]:
        """Keep a moving average of the weights of each update, if a rank does not see all of them.

        Every rank calls it before training, and again after it has gone back to an earlier state.

        Args:
            rule: how the average follows the weights.
            step: weight updates of the run so far.
            averages: as they are now, by the parameters' names.

        Returns:
            names of the parameters whose averages `kept_average` returns; a rank keeps those of all others itself.
        """
        return frozenset()

    def kept_average(self) -> tuple[dict[str, Tensor], int]:
        """Return the averages by name, and their steps since `keep_average`; every rank has brought its gradients."""
        return {}, 0

    @property
    def updates_per_batch(self) -> int:
        """Return how many updates are made of what is one global batch for ddp; schedules go by those."""
        return 1

    @property
    def dealer(self) -> Any:
        """Return who deals the data to ranks that go at their own pace; None where all go together."""
        return None

    @property
    def lost_with_a_worker(self) -> list[str]:
        """Return names for state of which a worker that dies has the only copy."""
        return []

    # -- between the ranks --------------------------------------------------------------------------------------

    def reduce(self, values: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Join packed metrics of all ranks, in place; shape stays."""
        return self.world.all_reduce(values, op)

    def quiesce(self, copies: Mapping[str, Tensor] | None = None) -> None:
        """Return once nothing is in flight, and all ranks see the same weights and buffers; every rank calls it.

        Args:
            copies: of buffers as they were earlier, which all ranks are to see the same as well.
        """
        if self.module is not None:
            for buffer in (*self.module.buffers(), *(copies or {}).values()):
                self.world.broadcast(buffer)

    def finish(self) -> None:
        """Let all ranks have the same weights, now that training is over; every rank calls it."""
        self.quiesce()

    def measured(self) -> dict[str, float]:
        """Return what it has measured of itself since it was last asked, on the main rank; every rank calls it."""
        return {}

    # -- state --------------------------------------------------------------------------------------------------

    def state_dict(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Return weights and optimizer states; every strategy gives them the same names and whole shapes.

        Where a rank has a shard only, it is a DTensor. Optimizer states are by the names of the parameters.
        """
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        return {
            "module": module.state_dict(),
            "optimizers": [_by_name(optimizer, names) for optimizer in optimizers],
        }

    def replicas_of(self, rank: int, size: int) -> list[int]:
        """Return which of so many ranks hold the same tensors as one of them, itself first."""
        return [rank, *(one for one in range(size) if one != rank)] if self.traits.alike else [rank]

    def pauses(self, mark: Callable[[], Any]) -> list[tuple[Any, Any]]:
        """Let it be marked when this rank's device waits for others while it computes.

        Args:
            mark: returns a moment of the device's time.

        Returns:
            a list that is added to: begin and end of each pause. Where nothing waits on a device it stays empty.
        """
        return []

    def own_state(self, module: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
        """Return what `load_state_dict` needs to bring this rank where it is; nothing is communicated."""
        return self.state_dict(module, optimizers)

    def load_own_states(
        self, states: Sequence[dict[str, Any]], module: nn.Module, optimizers: list[Optimizer], *, own: bool
    ) -> None:  # fmt: skip
        """Take over what `own_state` returned on this rank (`own`), or on all of a former number of ranks."""
        self.load_state_dict(states[0], module, optimizers)

    def whole_weights(self, module: nn.Module) -> dict[str, Any]:
        """Return the whole weights, in main memory, on the main rank; every rank calls it."""
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}

    def sharded_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name of which this rank has a shard only, as DTensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any], module: nn.Module, optimizers: list[Optimizer]) -> None:
        """Take over what `state_dict` of any strategy returned.

        Raises:
            ValueError: there are other optimizers than in the state.
        """
        module.load_state_dict(state["module"])
        if len(state["optimizers"]) != len(optimizers):
            raise ValueError(
                f"the checkpoint holds {len(state['optimizers'])} optimizers and the module has {len(optimizers)}. "
                + OTHER_STATE
            )
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(_by_number(optimizer, names, saved))

    def device(self, local_rank: int, accelerator: str) -> torch.device:
        """Return the device that a rank works on."""
        return torch.device("cuda", local_rank) if accelerator == "cuda" else torch.device(accelerator)

    def backend(self, device: torch.device) -> str:
        """Return the name of torch's library for collectives between ranks that work on such a device."""
        return "nccl" if device.type == "cuda" else "gloo"


def sparse_tables(module: nn.Module) -> list[str]:
    """Return the names of the embeddings that are trained with sparse gradients."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    parts = ((name, part) for name, part in module.named_modules() if isinstance(part, kinds) and part.sparse)
    return [name for name, part in parts if part.weight.requires_grad]


def warn_of_lost_residuals(world: World) -> None:
    """Warn that compression residuals are dropped, because they are of another number of ranks."""
    if world.main_rank:
        warnings.warn(
            "the number of ranks has changed: what compression had kept for later gradients is lost", stacklevel=3
        )


def check_dense(module: nn.Module, what: str) -> None:
    """Refuse embeddings whose gradients are sparse, before training.

    Args:
        module: the user's.
        what: the option that can't sum them.

    Raises:
        ValueError: there is such an embedding; the message says what to do.
    """
    if names := sparse_tables(module):
        raise ValueError(f"{what} sums no sparse gradients, and {names[0]} has them: say sparse=False, or strategy=ddp")


def check_frozen(module: nn.Module | None, frozen: Sequence[Tensor], what: str) -> None:
    """Refuse gradients of parameters that were frozen at set-up: a strategy that does not know them cannot join them.

    Args:
        module: the user's.
        frozen: its parameters that required no gradient at set-up.
        what: name of the strategy.

    Raises:
        ValueError: one of them requires a gradient now.
    """
    for parameter in frozen:
        if parameter.requires_grad:
            names = {id(each): name for name, each in module.named_parameters()} if module is not None else {}
            raise ValueError(
                f"{names.get(id(parameter), 'a parameter')} was frozen at set-up and is trained now, and {what} joins "
                "only parameters that required a gradient then: freeze it in on_train_start instead, or take "
                "strategy=ddp"
            )


def _parameter_names(optimizer: Optimizer, names: Mapping[int, str]) -> list[str]:
    """Return the names of an optimizer's parameters, in its order; what isn't the module's has a number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [names.get(id(parameter), f"#{number}") for number, parameter in enumerate(parameters)]


def _by_name(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state with names of parameters in the place of torch's numbers."""
    found, state = _parameter_names(optimizer, names), optimizer.state_dict()
    return {
        **state,
        "class": type(optimizer).__qualname__,
        "state": {found[number]: values for number, values in state["state"].items()},
        "param_groups": [{**g, "params": [found[number] for number in g["params"]]} for g in state["param_groups"]],
    }


def _by_number(optimizer: Optimizer, names: Mapping[int, str], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inverse of `_by_name`, for an optimizer of the same class and the same groups, in whatever order.

    Raises:
        ValueError: the class, the parameters or the division into groups differ.
    """
    own = type(optimizer).__qualname__
    if (before := saved.get("class", own)) != own:
        raise ValueError(f"the optimizer of the checkpoint is {before}, and the module's is {own}. {OTHER_STATE}")
    order = _parameter_names(optimizer, names)
    numbers = {name: number for number, name in enumerate(order)}
    known = {name for group in saved["param_groups"] for name in group["params"]}
    if known != set(numbers):
        missing, more = sorted(set(numbers) - known), sorted(known - set(numbers))
        raise ValueError(
            f"the optimizer of the checkpoint has other parameters: it lacks {', '.join(missing) or 'none'}, and has "
            f"{', '.join(more) or 'none'} that this one hasn't. {OTHER_STATE}"
        )
    groups = {frozenset(group["params"]): group for group in saved["param_groups"]}
    now = optimizer.state_dict()["param_groups"]
    divided = [frozenset(order[number] for number in group["params"]) for group in now]
    if set(divided) != set(groups):
        described = " and ".join("; ".join(", ".join(sorted(one)) for one in each) for each in (groups, divided))
        raise ValueError(
            f"the optimizer of the checkpoint has other parameter groups than the module's: {described}. {OTHER_STATE}"
        )
    return {  # torch goes by places: groups and numbers have to be in the optimizer's order
        **saved,
        "state": {numbers[name]: values for name, values in saved["state"].items()},
        "param_groups": [{**groups[key], "params": g["params"]} for key, g in zip(divided, now, strict=True)],
    }


def _finite(gradient: Tensor) -> bool:
    values = gradient._values() if gradient.is_sparse else gradient
    return bool(values.isfinite().all())
