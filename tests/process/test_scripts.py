"""Programs in the usual forms train on several devices: without a guard, from standard input, in a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests import warm

SCRIPT = """
import enum, os, signal, sys
from dataclasses import dataclass, field
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
import fabricx as fx
from fabricx.strategies import ParameterServer
from fabricx.testing import QUIET

print("begins", sys.argv[1:], flush=True)
os.environ["OF_THE_SCRIPT"] = "set"
torch.set_default_dtype(torch.float64)
folder = sys.argv[1]
SCALE = 2.0
calls = []

class Kind(enum.Enum):
    PLAIN = 1

@dataclass
class Config:
    lr: float = 0.1
    kind: Kind = Kind.PLAIN

@dataclass
class Batch:
    x: torch.Tensor
    indices: list = field(default_factory=list)

    def to(self, device, non_blocking=False):
        return Batch(self.x.to(device), self.indices)

class Numbers(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return index

def collate(indices):
    return Batch(torch.tensor([[SCALE * index] for index in indices]), indices)

def make():
    @dataclass
    class Prediction:
        index: int

    class Net(fx.Module):
        def __init__(self, config, act, kind=Config):
            super().__init__()
            self.save_hyperparameters()
            self.net, self.act, self.config = nn.Linear(1, 1), act, config

        def training_step(self, batch, batch_idx):
            assert type(batch) is Batch and os.environ["OF_THE_SCRIPT"] == "set"
            assert batch.x.dtype == torch.float64 and self.config.kind is Kind.PLAIN
            calls.append(batch_idx)
            once = f"{folder}/killed"
            if self.global_step == 2 and self.global_rank == 1 and not os.path.exists(once):
                open(once, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.act(self.net(batch.x)).square().mean()
            self.log("loss", loss)
            return loss

        def predict_step(self, batch, batch_idx):
            return [Prediction(index) for index in batch.indices]

        def configure_optimizers(self):
            return Descent(self.parameters(), lr=self.config.lr)

    return Net, Prediction

class Descent(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)

@dataclass
class Seen:
    count: int = 0

class Counts(fx.Callback):
    def __init__(self):
        self.seen = Seen()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.seen.count += 1

Net, Prediction = make()
net, counts = Net(Config(), lambda x: 0.1 * x), Counts()
before = net.net.weight.clone()
for strategy, epochs in (("ddp", 1), (ParameterServer(servers=1), 2)):
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, collate_fn=collate)
    trainer = fx.Trainer(strategy=strategy, max_epochs=epochs, callbacks=[counts], **QUIET | {"devices": 2})
    trainer.fit(net, loader)
    print("steps", trainer.global_step, len(trainer.failures), flush=True)
assert not torch.equal(net.net.weight, before)
assert type(net) is Net and type(net.config) is Config and type(counts.seen) is Seen
assert calls == []  # variables are copied to the workers, and not back
predicted = trainer.predict(net, loader)
assert {type(item) for batch in predicted for item in batch} == {Prediction}
path = f"{folder}/net.ckpt"
trainer.save_checkpoint(path, weights_only=True)
again = Net.load_from_checkpoint(path, config=Config(), act=abs, kind=Config)
assert torch.equal(again.net.weight, net.net.weight)
print("ends", [item.index for batch in predicted for item in batch] == list(range(16)), flush=True)
"""


def test_a_script_without_a_guard_runs_once_and_trains_twice(own_folder: Path) -> None:
    elsewhere = own_folder / "elsewhere"
    elsewhere.mkdir()
    (own_folder / "script.py").write_text(SCRIPT)
    done = warm.run(
        [sys.executable, str(own_folder / "script.py"), str(own_folder)],
        cwd=elsewhere, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("begins", "steps", "ends"))]
    assert lines == [f"begins ['{own_folder}']", "steps 4 1", "steps 8 0", "ends True"], done.stdout


SHORT = """
import sys
import fabricx as fx
from fabricx.testing import QUIET, TinyModule, tiny_loader
class Net(TinyModule):
    def training_step(self, batch, batch_idx):
        self.log("constant", 3.0)
        return super().training_step(batch, batch_idx)

trainer = fx.Trainer(max_epochs=1, **QUIET | {"devices": 2})
trainer.fit(Net(), tiny_loader(32, 4))
print("steps", trainer.global_step, float(trainer.callback_metrics["constant"]), sys.argv[1:])
"""


def test_a_program_from_standard_input_trains(own_folder: Path) -> None:
    # A new interpreter, with a script without a file.
    done = subprocess.run(
        [sys.executable, "-", "--lr", "1"], input=SHORT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "steps 4 3.0 ['--lr', '1']\n", done.stdout + done.stderr


def test_a_module_of_a_package_trains(own_folder: Path) -> None:
    (own_folder / "package").mkdir()
    (own_folder / "package" / "__init__.py").touch()
    (own_folder / "package" / "numbers.py").write_text("THREE = 3.0\n")
    inside = SHORT.replace("import sys", "import sys\nfrom .numbers import THREE").replace("3.0", "THREE")
    (own_folder / "package" / "train.py").write_text(inside)
    done = warm.run(
        [sys.executable, "-m", "package.train", "--lr", "1"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout == "steps 4 3.0 ['--lr', '1']\n", done.stdout + done.stderr


def test_cells_of_a_notebook_train_can_be_interrupted_and_redefine_classes(own_folder: Path) -> None:
    folders = {name: str(own_folder / name) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    others = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "notebook.py")], env={**others, **folders},
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    cells = [json.loads(line) for line in lines]
    assert len(cells) == 4, done.stdout + done.stderr
    first, interrupted, changed, failed = (cell["shown"] for cell in cells)
    assert "epoch 0/0  4/4" in first
    assert "\x1b[" not in first + interrupted + changed  # plain lines, which a cell shows unchanged
    assert "steps 4 True\n" in first  # the order of stdout and stderr is undefined
    assert "interrupted True True\n" in interrupted
    assert "version 2.0 True\n" in changed
    assert 'raise ValueError("of a cell")' in failed
    for cell in cells:  # the fork server remains for the next fit
        assert len(cell["left"]) <= 1, cell["left"]
