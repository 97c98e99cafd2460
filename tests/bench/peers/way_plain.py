"""Plain PyTorch; under torchrun with several ranks."""

import torch.distributed as dist
from tasks import arguments, loss_of, make_data, make_model, make_optimizer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

options = arguments()
model, data = make_model(options.task), make_data(options)
sampler = None
if options.ranks > 1:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    sampler = DistributedSampler(data)
optimizer = make_optimizer(model)
loader = DataLoader(data, options.batch_size, shuffle=sampler is None, sampler=sampler)
for inputs, targets in loader:
    optimizer.zero_grad()
    loss_of(model, inputs, targets).backward()
    optimizer.step()
if options.ranks > 1:
    dist.destroy_process_group()
