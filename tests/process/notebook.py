"""Run cells of a notebook, interrupt a cell, and print the output of each cell; a program of `test_scripts.py`."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import nbformat
import psutil
from nbclient import NotebookClient

CELLS = (
    """
import os, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import fabricx as fx

class Net(fx.Module):
    def __init__(self, before=lambda: None):
        super().__init__()
        self.net, self.before = nn.Linear(4, 2), before

    def training_step(self, batch, batch_idx):
        self.before()
        self.log("version", 1.0)
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def fit(net, epochs=1):
    trainer = fx.Trainer(max_epochs=epochs, devices=2, logger=False, enable_model_summary=False)
    trainer.fit(net, DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=8))
    return trainer

net = Net()
trainer = fit(net)
print("steps", trainer.global_step, type(net) is Net)
""",
    """
def touch():
    open("began", "w").close()
    time.sleep(0.02)

trainer = fit(Net(touch), epochs=10000)
print("interrupted", trainer.interrupted, trainer.global_step > 0)
""",
    """
class Net(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("second", 2.0)
        return loss

net = Net()
print("version", float(fit(net).callback_metrics["second"]), type(net) is Net)
""",
    """
def fail():
    raise ValueError("of a cell")

fit(Net(fail))
""",
)


def interrupt(client: NotebookClient) -> None:
    """Interrupt the kernel when a worker trains, as the button of a notebook does."""
    while not Path("began").exists():
        time.sleep(0.05)
    asyncio.run(client.km.interrupt_kernel())  # type: ignore[union-attr, arg-type]


def main() -> None:
    """Print the text of each cell, and the processes that remain after it, as lines of JSON."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]  # type: ignore[no-untyped-call]
    notebook = nbformat.v4.new_notebook(cells=cells)  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True)
    with client.setup_kernel():
        for number, cell in enumerate(notebook.cells):
            if number == 1:
                threading.Thread(target=interrupt, args=(client,), daemon=True).start()
            client.execute_cell(cell, number)
            shown = [out.get("text") or "\n".join(out.get("traceback", [])) for out in cell.outputs]
            commands = [" ".join(process.cmdline()) for process in psutil.Process().children(recursive=True)]
            left = [line for line in commands if "ipykernel" not in line and "resource_tracker" not in line]
            print(json.dumps({"shown": "".join(shown), "left": left}))


if __name__ == "__main__":
    main()
