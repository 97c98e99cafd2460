"""The Trainer of Hugging Face transformers; under torchrun with several ranks."""

import tempfile

from tasks import arguments, loss_of, make_data, make_model, make_optimizer
from torch import nn
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.model = make_model(task)

    def forward(self, inputs, labels):
        return {"loss": loss_of(self.model, inputs, labels)}


class Samples:
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        inputs, labels = self.data[index]
        return {"inputs": inputs, "labels": labels}


options = arguments()
model = Net(options.task)
with tempfile.TemporaryDirectory() as folder:
    training_arguments = TrainingArguments(
        folder, num_train_epochs=1, per_device_train_batch_size=options.batch_size, use_cpu=True, max_grad_norm=0.0,
        ddp_backend="gloo" if options.ranks > 1 else None, report_to="none", dataloader_pin_memory=False,
        ddp_find_unused_parameters=False,
    )  # fmt: skip
    trainer = Trainer(
        model, training_arguments, train_dataset=Samples(make_data(options)), optimizers=(make_optimizer(model), None)
    )
    trainer.train()
