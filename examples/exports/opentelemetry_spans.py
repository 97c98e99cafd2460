"""Coarse spans for OpenTelemetry: stages, epochs and validations. Spans of single steps would cost too much.

pip install opentelemetry-sdk; then: python opentelemetry_spans.py. It writes spans.jsonl; replace the console exporter
by an exporter for your service (OTLP, Jaeger).
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fabricx as fx


class Spans(fx.Callback):
    """Record a span for each stage, epoch and validation, on the main rank."""

    def __init__(self, path="spans.jsonl"):
        self.path, self.open = path, []

    def setup(self, trainer, module, stage):
        if not trainer.is_global_zero:
            return
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

        self.file = open(self.path, "a")  # noqa: SIM115  # closed by teardown
        exporter = ConsoleSpanExporter(out=self.file, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        self.tracer = provider.get_tracer("fabricx")
        self.begin(trainer, stage)

    def begin(self, trainer, name):
        if trainer.is_global_zero:
            self.open.append(self.tracer.start_as_current_span(name, attributes={"step": trainer.global_step}))
            self.open[-1].__enter__()

    def end(self, trainer):
        if trainer.is_global_zero:
            self.open.pop().__exit__(None, None, None)

    def on_train_epoch_start(self, trainer, module):
        self.begin(trainer, f"epoch {trainer.current_epoch}")

    def on_train_epoch_end(self, trainer, module):
        self.end(trainer)

    def on_validation_start(self, trainer, module):
        self.begin(trainer, "validation")

    def on_validation_end(self, trainer, module):
        self.end(trainer)

    def teardown(self, trainer, module, stage):
        self.end(trainer)
        if trainer.is_global_zero:
            self.file.close()


class Line(fx.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    inputs = torch.randn(256, 3)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    fx.Trainer(max_epochs=2, callbacks=[Spans()]).fit(Line(), data, data)
