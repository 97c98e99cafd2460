"""fabricx with its defaults: progress bar, TensorBoard, checkpoint, telemetry, recovery."""

from tasks import arguments, loss_of, make_data, make_model, make_optimizer
from torch.utils.data import DataLoader

import fabricx as fx


class Net(fx.Module):
    def __init__(self, task):
        super().__init__()
        self.model = make_model(task)

    def training_step(self, batch, batch_idx):
        loss = loss_of(self.model, *batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return make_optimizer(self)


if __name__ == "__main__":
    options = arguments()
    loader = DataLoader(make_data(options), options.batch_size, shuffle=True)
    trainer = fx.Trainer(max_epochs=1, accelerator="cpu", devices=options.ranks)
    trainer.fit(Net(options.task), loader)
