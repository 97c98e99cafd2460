"""Accelerate; under torchrun with several ranks. Nothing is logged or saved."""

from accelerate import Accelerator  # pyright: ignore[reportMissingImports]
from tasks import arguments, loss_of, make_data, make_model, make_optimizer
from torch.utils.data import DataLoader

options = arguments()
accelerator = Accelerator(cpu=True)
model = make_model(options.task)
optimizer = make_optimizer(model)
loader = DataLoader(make_data(options), options.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for inputs, targets in loader:
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, inputs, targets))
    optimizer.step()
accelerator.end_training()
