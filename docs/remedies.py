"""What to do about errors whose message does not say it: by package, exception and start of the message.

`tables.py` adds the remedy to the message in the reference; a row that belongs to no message ends the build.
"""

from __future__ import annotations

from typing import Final

_FOREIGN: Final = (
    "only another program that writes to the port or to the files of the run causes this: give each run a key and a "
    "folder of its own ([Security](../security.md)). Without another program, report a defect"
)
_DAMAGED: Final = (
    "the file is damaged, or another program has written it: `fabricx checkpoint verify PATH`, then an older "
    "checkpoint of `fabricx checkpoint ls runs`"
)
_ENDED: Final = (
    "look in `logs/` of the run's folder for the reason why that process ended. Recovery replaces a dead worker; "
    "otherwise `fabricx resume RUN` continues from the newest checkpoint"
)
_SPELLING: Final = "correct the name: the [reference](index.md) lists all public names"
_NETWORK: Final = (
    "check that the process of the main rank is alive, that `MASTER_ADDR` and `MASTER_PORT` are those of its machine, "
    "and that no firewall is between the machines; `GLOO_SOCKET_IFNAME` selects the network interface"
)
_PLAIN: Final = (
    "objects that ranks exchange, and contents of files, are numbers, texts, tensors and collections of them: convert "
    "others before, or pass `weights_only=False` for a checkpoint that you trust"
)
_DEFECT: Final = "report a defect, with the options of the strategy"

# Package, exception (None: any), start of the message as the page has it, remedy.
REMEDIES: Final = (
    ("fabricx", "AttributeError", "module 'fabricx' has no attribute", _SPELLING),
    (
        "fabricx.by_value",
        "PicklingError",
        "",
        "create the object in `setup()`, which runs in each worker, or in a module that the script imports",
    ),
    ("fabricx.by_value", "UnpicklingError", "", "keep the class or function until `fit` has returned"),
    ("fabricx.callbacks", "AttributeError", "module", _SPELLING),
    ("fabricx.checkpoint", "AttributeError", "module", _SPELLING),
    ("fabricx.checkpoint", "MissingCheckpoint", "there is no checkpoint", "`fabricx checkpoint ls runs` lists them"),
    ("fabricx.checkpoint", "OSError", "rank", "the error is that of the file system: free space, permissions"),
    ("fabricx.checkpoint", "PicklingError", "a tensor that is divided", "save it by `trainer.save_checkpoint`"),
    ("fabricx.checkpoint", "SafetensorError", "", _DAMAGED),
    (
        "fabricx.checkpoint",
        "TimeoutError",
        "the other ranks",
        "a rank has died, or its file system is slow: see its log in `logs/`. The checkpoints before remain valid",
    ),
    *(
        ("fabricx.checkpoint", "ValueError", start, _DAMAGED)
        for start in (
            "<em>field</em> isn't text",
            "a chunk of",
            "a numpy scalar",
            "an array of another type",
            "an unknown unit",
            "bytes of a stated size",
            "its chunks overlap",
            "no tensor has the type",
        )
    ),
    ("fabricx.cli", "MissingConfigException", "there is no", "`fabricx fit --help` lists the choices of each group"),
    ("fabricx.cli", "TypeError", "<em>cls</em> is not a", "set `_target_` to a class of this kind"),
    (
        "fabricx.core",
        "AttributeError",
        "",
        "as in PyTorch: assign the attribute in `__init__`, after `super().__init__()`, or correct its name",
    ),
    ("fabricx.distributed", "ConnectionError", "the other process has closed", _ENDED),
    ("fabricx.distributed", "DistNetworkError", "the connection to the run's store was lost", _ENDED),
    ("fabricx.distributed", "DistNetworkError", "the run's store at", _NETWORK),
    ("fabricx.distributed", "DistStoreError", "wait timeout", _NETWORK),
    ("fabricx.distributed", "EOFError", "the connection to rank", _ENDED),
    (
        "fabricx.distributed",
        "OSError",
        "memory couldn't be mapped",
        "free memory, or enlarge `/dev/shm` (`docker run --shm-size=8g`); `strategy.shared_memory=false` needs none",
    ),
    ("fabricx.distributed", "OSError", "too many bytes", _FOREIGN),
    (
        "fabricx.distributed",
        "TimeoutError",
        "rank",
        "see [Debugging a hang](../guides/hangs.md)",
    ),
    ("fabricx.distributed", "TypeError", "an object of rank", _PLAIN),
    *(
        ("fabricx.distributed", kind, start, _PLAIN)
        for kind in ("TypeError", "ValueError")
        for start in ("it can't be read", "it contains", "its pickle does more")
    ),
    (
        "fabricx.distributed",
        "ValueError",
        "rank <em>rank</em> is on",
        "correct `LOCAL_WORLD_SIZE`, the number of ranks on each machine; or set `strategy.shared_memory=false`",
    ),
    ("fabricx.distributed", "ValueError", "the time of a request", _FOREIGN),
    ("fabricx.launch", "OSError", "it is not a regular file", _FOREIGN),
    ("fabricx.launch", "ValueError", "<em>run\\_dir</em> is not the folder", "pass a folder below `runs/`"),
    (
        "fabricx.launch",
        "ValueError",
        "FABRICX\\_KEY\\_FILE=",
        "create the file, readable for you only: `(umask 077; openssl rand -hex 32 > FILE)`",
    ),
    ("fabricx.launchers", "AttributeError", "module", _SPELLING),
    (
        "fabricx.launchers",
        "ValueError",
        "the job was not submitted",
        "change the options that the scheduler names",
    ),
    ("fabricx.loggers", "AttributeError", "module", _SPELLING),
    ("fabricx.loggers", "ValueError", "log\\_image", "pass a list with a value for each image"),
    (
        "fabricx.model_parallel",
        "IndexError",
        "<em>…</em>: index",
        "an index of the batch is negative or too large: enlarge the embedding, or correct the data",
    ),
    (
        "fabricx.model_parallel",
        "IndexError",
        "Target",
        "a label of the batch is negative or too large: set the number of classes, or correct the data",
    ),
    ("fabricx.model_parallel", "LookupError", "the module has no parameter", _DEFECT),
    (
        "fabricx.model_parallel",
        "LookupError",
        "",
        "`module.named_modules()` lists names; `auto` selects them",
    ),
    ("fabricx.model_parallel", "RuntimeError", "a schedule with", _DEFECT),
    (
        "fabricx.model_parallel",
        "ValueError",
        "a convolution with the kernel",
        "use `strategy=tensor` or `strategy=fsdp`, or compute the convolution outside of the blocks",
    ),
    ("fabricx.parameter_server", "EOFError", "a worker has died", _ENDED),
    ("fabricx.parameter_server", "LookupError", "there is no server", _DEFECT),
    ("fabricx.parameter_server", "OSError", "the server accepts no more", _ENDED),
    ("fabricx.parameter_server", "TypeError", "<em>class</em> holds no updates", _DEFECT),
    ("fabricx.parameter_server", "TypeError", "a server does not support", _FOREIGN),
    (
        "fabricx.session",
        "RuntimeError",
        "this run has no training\\_step",
        "call it in hooks of training only",
    ),
    ("fabricx.telemetry", "OSError", "", _FOREIGN),
    ("fabricx.telemetry", "ValueError", "a number has more", _FOREIGN),
    ("fabricx.telemetry", "ValueError", "no field has type", _FOREIGN),
)


def remedy(package: str, exception: str, text: str) -> tuple[str, ...] | None:
    """Return the first row that belongs to a message; None if there is none.

    Args:
        package: name of the package.
        exception: name of the exception.
        text: the message, in Markdown.

    >>> remedy("fabricx.telemetry", "ValueError", "a number has more than 64 bits") is REMEDIES[-2]
    True
    """
    for row in REMEDIES:
        if row[:2] == (package, exception) and text.startswith(row[2]):
            return row
    return None
