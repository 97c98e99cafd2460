"""The data of a run on a rank: the user's loaders, the feeds that read them, and the number of batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch

from fabricx.core.hook_calls.hooks import overrides
from fabricx.core.module_hooks import ModuleHooks
from fabricx.core.options.duration import check_count
from fabricx.core.strategy_parts import ModelParallel, as_part
from fabricx.data.advice import advise_on_batches, advise_on_overfitting, advise_on_shuffling, advise_on_validation
from fabricx.data.created_loaders import CreatedLoaders
from fabricx.data.data_state import find_generators
from fabricx.data.factory import make_feed
from fabricx.data.feed import Feed
from fabricx.data.order import Balance
from fabricx.data.sources import evaluation_sources, training_source
from fabricx.distributed.world import World
from fabricx.errors import WrongArgument

if TYPE_CHECKING:
    from fabricx.core.datamodule import DataModule
    from fabricx.core.module import Module
    from fabricx.core.options.trainer_options import TrainerOptions
    from fabricx.core.state import RunState
    from fabricx.core.strategy import Strategy

READ_BY_LOADERS: Final = ("limit_train_batches", "limit_val_batches", "val_check_interval", "use_distributed_sampler")
READ_AT_SET_UP: Final = ("overfit_batches", "max_time", "precision", "sync_batchnorm", "deterministic")
_SOURCES = {"fit": "val", "validate": "val", "test": "test", "predict": "predict"}  # of evaluation loaders, by stage


@dataclass
class BatchCounts:
    """Numbers of batches of the newest run.

    Attributes:
        training: batches per epoch of the rank with the most batches; infinity if unknown, as before the first fit.
        planned: the same, as counted by the ranks with which the run began, for intervals of validations.
        evaluation: batches of each evaluation loader, by "val", "test" and "predict".
    """

    training: int | float = float("inf")
    planned: int | float = float("inf")
    evaluation: dict[str, list[int | float]] = field(default_factory=dict)

    def of(self, word: str) -> list[int | float]:
        """Return the batches of each loader of the newest evaluation of a kind.

        Args:
            word: "val", "test" or "predict".
        """
        return list(self.evaluation.get(word, []))


class RunData:
    """Loaders and feeds of a run; loaders of the call precede the data module's and the module's.

    Args:
        stage: "fit", "validate", "test" or "predict".
        passed: training and evaluation loaders of the call; None for those of the data module or the module.
        module: the user's module.
        datamodule: of the call, if any.
        options: of the run.
        strategy: determines how a global batch is divided.
        state: seed and initial number of ranks.
        balance: shares of the ranks in each global batch.
        batches: receives the numbers of batches.
        earlier: training loader of the newest fit in this process, which a hook of an evaluation may read.

    Attributes:
        stage: as in the arguments.
        train_dataloader: the training loader; in an evaluation, that of the newest fit; None without a fit.
        val_dataloaders: the evaluation loader or loaders of the stage; None if the stage has none.
        val_feeds: reads each evaluation loader; empty if the stage has none.
        several_loaders: there are several evaluation loaders.
        val_every: batches (of the ranks with which the run began), or steps, between two validations; infinity for
            ends of epochs only.
        own_generators: random generators of the module and the data, by path.
        created: creates loaders by methods of the data module and the module, also again as an earlier run did.
    """

    def __init__(
        self, stage: str, passed: tuple[Any, Any], module: Module, datamodule: DataModule | None,
        options: TrainerOptions, strategy: Strategy, state: RunState, balance: Balance, batches: BatchCounts,
        earlier: Any = None,
    ) -> None:  # fmt: skip
        self.stage, self._passed = stage, passed
        self._module = module
        self._options, self._strategy, self._state, self._balance = options, strategy, state, balance
        self.batches = batches
        self.train_dataloader = earlier
        self.val_dataloaders: Any = None
        self._train_feed: Feed | None = None  # None in an evaluation
        self.val_feeds: list[Feed] = []
        self.several_loaders = False
        self.val_every = float("inf")
        self.own_generators: dict[str, Any] = {}
        self.created = CreatedLoaders(stage, module, datamodule, options, state)
        self._read: dict[str, Any] = {}  # options that were read at set-up

    @property
    def train_feed(self) -> Feed:
        """Return the feed of the training loader.

        Raises:
            RuntimeError: this is not a fit.
        """
        if self._train_feed is None:
            raise RuntimeError(f"there is no feed of training data in trainer.{self.stage}: only fit has one")
        return self._train_feed

    @property
    def validates(self) -> bool:
        """Return whether a fit validates: a loader has batches, perhaps on another rank or after a reload."""
        recreated = self._passed[1] is None and bool(self._options.reload_dataloaders_every_n_epochs)
        return any(recreated or not feed.exact_position or feed.batches() for feed in self.val_feeds)

    @property
    def feeds(self) -> list[Feed]:
        """Return the feeds of a fit, training first; none in an evaluation."""
        return [] if self._train_feed is None else [self._train_feed, *self.val_feeds]

    def load(self, world: World) -> None:
        """Build the feeds of the stage.

        Args:
            world: the ranks.

        Raises:
            ValueError: there is no batch to train on, or a limit does not fit a loader.
        """
        fits = self.stage == "fit"
        if fits:
            early = self._train_feed
            if early is None:
                self._create_training()
            self._make_train_feed(world)  # also after `count_early`: later hooks may have changed the module
            if early is not None:
                self.train_feed.at_first = early.at_first
        self._load_evaluation(world)
        if fits:
            self.set_validation_interval()
        self._read = {name: getattr(self._options, name) for name in (*READ_BY_LOADERS, *READ_AT_SET_UP)}
        if world.main_rank and not world.newcomer:
            self._advise()

    def count_early(self, world: World) -> None:
        """Create the training loader and count its batches, for a hook of the set-up that precedes `load`.

        Args:
            world: the ranks.

        Raises:
            ValueError: there is no batch to train on, or a limit does not fit the loader.
        """
        if self.stage == "fit" and self._train_feed is None and not self.created.running:
            self._create_training()
            self._make_train_feed(world)

    def check_options(self) -> None:
        """Refuse options that a hook has changed after they were read.

        Raises:
            ValueError: an option has changed, and would have no effect.
        """
        reloads = self._options.reload_dataloaders_every_n_epochs
        for name, read in self._read.items():
            now = getattr(self._options, name)
            created = self._passed[name == "limit_val_batches"] is None and name in READ_BY_LOADERS
            if (type(now), now) != (type(read), read) and not (reloads and created):  # 1 is not 1.0
                raise ValueError(
                    f"a hook has set trainer.{name}={now!r}, but the run has begun with {read!r}, and continues with "
                    f"it: pass {name} to the Trainer. With reload_dataloaders_every_n_epochs=1, loaders that "
                    "train_dataloader and val_dataloader return have the new limits in the next epoch. "
                    "on_train_batch_start returns -1 to skip the rest of an epoch; trainer.should_stop ends the run"
                )

    def _advise(self) -> None:
        """Warn about loaders that the run ignores or shuffles."""
        options, word = self._options, _SOURCES[self.stage]
        if self.stage == "fit":
            defined = callable(getattr(self._module, "validation_step", None))
            advise_on_validation(defined, self.val_dataloaders, options.limit_val_batches)
        loaders = evaluation_sources(self.val_dataloaders) if self.val_feeds else []
        advise_on_batches(word, loaders, self.batches.evaluation[word])
        if self.stage == "fit" and options.overfit_batches:
            advise_on_overfitting([*evaluation_sources(self.train_dataloader), *loaders])
        else:
            advise_on_shuffling(word, loaders)

    def _load_evaluation(self, world: World) -> None:
        """Build the feeds of the evaluation loaders."""
        options, fits, word = self._options, self.stage == "fit", _SOURCES[self.stage]
        limit = _limit(getattr(options, f"limit_{word}_batches"))
        source = self._passed[1]
        if source is None and limit != 0:
            source = self.created.create(1, f"{word}_dataloader")
        has_step = not fits or callable(getattr(self._module, "validation_step", None))
        loaders = evaluation_sources(source) if has_step and limit != 0 else []
        self.val_dataloaders, self.several_loaders = source, len(loaders) > 1
        self.val_feeds = [self._evaluation_feed(world, loader, limit) for loader in loaders]
        self.batches.evaluation[word] = [feed.batches() for feed in self.val_feeds]
        for loader, batches in zip(loaders, self.batches.evaluation[word], strict=True):
            _check_part(f"limit_{word}_batches", limit, loader, batches, self._shares(world))

    def reload_validation(self, world: World) -> None:
        """Create the validation loaders again before a validation, if `reload_dataloaders_every_n_epochs` is due.

        Args:
            world: the ranks.
        """
        if self._passed[1] is None and self.created.outdated(1):
            self._load_evaluation(world)
            self.set_validation_interval()

    def begin_epoch(self, world: World) -> None:
        """Prepare the training data of an epoch, and count its batches.

        The loader is created again if `reload_dataloaders_every_n_epochs` is due.

        Args:
            world: the ranks.
        """
        if self._passed[0] is None and not self._state.batch and self.created.outdated(0):
            self._create_training()
            self._make_train_feed(world)
            self.set_validation_interval()
        else:
            self.train_feed.begin(self._state.epoch)
            self.count_again(world)

    def count_again(self, world: World) -> None:
        """Count the batches of an epoch, whose data may have become longer or shorter.

        Args:
            world: the ranks.

        Raises:
            ValueError: no batch remains.
        """
        self.count_batches(world)
        if not self.batches.training and self._options.limit_train_batches:
            raise ValueError(
                f"{type(self.train_dataloader).__name__} has no batch in epoch {self._state.epoch}: its data, or the "
                "length of its sampler, have changed since the epoch before"
            )
        self.val_every = self._validation_interval()

    def _create_training(self) -> None:
        loader = self._passed[0] if self._passed[0] is not None else self.created.create(0, "train_dataloader")
        self.train_dataloader = training_source(loader)

    def rebuild(
        self, world: World, created_in: Sequence[int] | None = None, created_from: Sequence[Any] = (None, None),
        datamodule: Any = None, *, changed: bool = False,
    ) -> None:  # fmt: skip
        """Build all feeds of a fit again, after a checkpoint has restored the position and the seed of the data order.

        Loaders that an earlier run has created in another epoch, or from another state of the data module, are created
        again from that state.

        Args:
            world: the ranks.
            created_in: `created.epochs` of the earlier run; None if unknown.
            created_from: `created.states` of the earlier run; None if unknown.
            datamodule: state of the data module in the earlier run; None or empty without.
            changed: the module has changed since it created loaders.
        """
        created_in = self.created.default_epochs() if created_in is None else created_in
        first = [feed.at_first for feed in self.feeds]
        again = self.created.differ(created_in, created_from, changed=changed)
        fresh = [passed is None and differs for passed, differs in zip(self._passed, again, strict=True)]
        self.created.load_datamodule(copy.deepcopy(datamodule) if any(fresh) else datamodule)
        if fresh[0]:
            with self.created.as_in(created_in[0], created_from[0]):
                self._create_training()
        self._make_train_feed(world)
        if not fresh[0]:
            self.train_feed.at_first = first[0]
        if fresh[1]:
            with self.created.as_in(created_in[1], created_from[1]):
                self._load_evaluation(world)
        elif self.val_feeds:
            limit, loaders = _limit(self._options.limit_val_batches), evaluation_sources(self.val_dataloaders)
            self.val_feeds = [self._evaluation_feed(world, loader, limit) for loader in loaders]
            for feed, values in zip(self.val_feeds, first[1:], strict=True):
                feed.at_first = values
        if any(fresh):  # methods that create loaders may change the state
            self.created.load_datamodule(datamodule)
        self.set_validation_interval()

    def sanity_feeds(self, world: World) -> list[Feed]:
        """Return the validation feeds, limited to the batches of the sanity check.

        Args:
            world: the ranks.
        """
        limits = [min(self._options.num_sanity_val_steps, feed.batches()) for feed in self.val_feeds]
        loaders = evaluation_sources(self.val_dataloaders)
        return [self._evaluation_feed(world, *arguments) for arguments in zip(loaders, limits, strict=True)]

    def count_batches(self, world: World) -> None:
        """Count the batches per epoch of the rank with the most batches; depends on the accumulation.

        Args:
            world: the ranks; a collective if their loaders have different lengths.
        """
        world, feed = world.axis("data"), self.train_feed
        batches = feed.batches(self._options.accumulate_grad_batches)
        if not feed.exact_position and world.size > 1 and not world.newcomer:
            counted = torch.tensor(float(batches), dtype=torch.float64, device=world.device)
            most = float(world.all_reduce(counted, "max"))
            batches = most if most == float("inf") else int(most)
        self.batches.training = batches
        planned = feed.planned_batches(self._options.accumulate_grad_batches)
        self.batches.planned = batches if planned is None else planned

    def set_validation_interval(self) -> None:
        """Set the number of batches (or steps, if so configured) between validations.

        Raises:
            ValueError: the interval is longer than an epoch, or a fraction of an epoch of unknown length.
        """
        every, total = self._options.val_check_interval, self.batches.planned
        self.val_every = self._validation_interval()
        whole = isinstance(every, int) and not isinstance(every, bool) and self.val_every != float("inf")
        if whole and self.val_every > total > 0 and self._options.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={every} is more than the {total} batches of an epoch; set a smaller interval, "
                "or check_val_every_n_epoch=None to count across epochs"
            )

    def _validation_interval(self) -> float:
        every, total = self._options.val_check_interval, self.batches.planned
        if not self.validates or every is None or isinstance(every, timedelta):
            return float("inf")
        if isinstance(every, str):
            return float(check_count("val_check_interval", every, "step", 1) or 1)
        if isinstance(every, int) and not isinstance(every, bool):
            return float(every)
        if total == float("inf"):
            if every != 1.0:
                raise ValueError(
                    f"val_check_interval={every} is a fraction of an epoch, and needs a loader with a length; set a "
                    "number of batches"
                )
            return float("inf")
        return float(max(1, int(total * every)))

    def _make_train_feed(self, world: World) -> None:
        """Build the training feed and count its batches.

        Raises:
            ValueError: there is no batch to train on.
        """
        options, strategy = self._options, self._strategy
        manual, limit = not self._module.automatic_optimization, _limit(options.limit_train_batches)
        feed = self._train_feed = self._feed(
            world,
            self.train_dataloader,
            limit,
            self._state.ranks,
            strategy.traits.batch_parts,
            self._balance,
            manual=manual,
        )
        self.own_generators = find_generators(self._module, "module") | feed.generators()
        if strategy.traits.batch_parts and (names := [*self.own_generators, *feed.lost_generators(within=True)]):
            raise ValueError(
                f"deterministic='elastic' gives the same result on any number of ranks, but {', '.join(names)} would "
                "advance on each rank separately: draw from the global generator of torch, numpy or "
                "python, which is seeded for each part of a global batch"
            )
        feed.begin(self._state.epoch)
        self.count_batches(world)
        batches = self.batches.training
        _check_part(
            "overfit_batches" if options.overfit_batches else "limit_train_batches",
            limit, self.train_dataloader, batches, self._shares(world),
        )  # fmt: skip
        if not batches and limit:
            raise ValueError(
                f"there is no batch to train on: {type(self.train_dataloader).__name__} is empty, or drop_last=True "
                "drops all of it (then use a smaller batch_size, or fewer ranks)"
            )

    def _shares(self, world: World) -> int:
        """Return the number of ranks over which the samples of a loader are divided."""
        return world.axis("data").size if self._options.use_distributed_sampler else 1

    def _evaluation_feed(self, world: World, source: Any, limit: int | float) -> Feed:
        """Build the feed of an evaluation loader."""
        return self._feed(world, source, limit, fixed=self.stage == "predict")

    def _feed(
        self, world: World, source: Any, limit: int | float, began_with: int = 0, parts: int = 0,
        balance: Balance | None = None, *, manual: bool = False, fixed: bool = False,
    ) -> Feed:  # fmt: skip
        if 0 < limit < 1 and not _has_length(source):
            raise ValueError(
                f"a fraction of the batches ({limit}) needs a loader with a length, but {type(source).__name__} has "
                "none: set a number of batches"
            )
        text = isinstance(source, (str, bytes))
        if not hasattr(source, "__iter__") or isinstance(source, torch.Tensor) or text:
            what = "is a batch" if isinstance(source, torch.Tensor) else "is text" if text else "is not iterable"
            raise WrongArgument(f"{type(source).__name__} {what}: pass a DataLoader or an iterable of batches")
        world = world.axis("data")
        if world.newcomer:  # the ranks that it will join: same number of batches as on the other ranks
            size = as_part(self._strategy, ModelParallel).data_ranks_of(world.local_size)
            world = replace(world, rank=0, size=size)
        options, strategy = self._options, self._strategy
        return make_feed(
            source, world, seed=self._state.seed, limit=limit, shard=options.use_distributed_sampler,
            began_with=began_with, example=strategy.traits.joint_steps or manual, parts=parts,
            dealt=not strategy.traits.lockstep, balance=balance, undivided=manual,
            fixed=fixed or (bool(options.overfit_batches) and self.stage == "fit"),
            weighted=overrides(self._module, "batch_weight", ModuleHooks), keeps_last=self.stage == "predict",
        )  # fmt: skip


def _check_part(name: str, limit: int | float, loader: Any, batches: int | float, ranks: int) -> None:
    """Refuse a fraction of the batches that is less than one batch.

    Raises:
        ValueError: the fraction is too small.
    """
    if isinstance(limit, float) and 0 < limit < 1 and not batches and len(loader):
        part = f"{limit} of {len(loader)} batches"
        less = (
            f"{part} is less than one" if ranks == 1 else f"{part}, divided over {ranks} ranks, is less than one each"
        )
        raise ValueError(f"{name}={less}: set a number of batches (1)")


def _has_length(loader: Any) -> bool:
    """Return whether the number of batches is defined; a DataLoader of a stream has `__len__`, and no length."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


def _limit(limit: int | float) -> int | float:
    """Return a limit of batches, where infinity is no limit."""
    return float("inf") if isinstance(limit, float) and limit == 1.0 else limit
