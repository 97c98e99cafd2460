"""Plain PyTorch; under torchrun with several ranks."""

import torch.distributed as dist
from tasks import arguments, loss_of, make_data, make_model, make_optimizer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

given = arguments()
model, data = make_model(given.task), make_data(given)
sampler = None
if given.ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(data)
optimizer = make_optimizer(model)
loader = DataLoader(data, given.batch_size, shuffle=sampler is None, sampler=sampler)
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_of(model, inputs, targets).backward()
    optimizer.step()
if given.ranks > 1:
    dist.destroy_process_group()
