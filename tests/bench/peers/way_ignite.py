"""Ignite; under torchrun with several ranks. Nothing is logged or saved."""

import ignite.distributed as idist  # pyright: ignore[reportMissingImports]
from ignite.engine import Engine  # pyright: ignore[reportMissingImports]
from tasks import arguments, loss_of, make_data, make_model, make_optimizer


def train(rank, options):
    model = idist.auto_model(make_model(options.task))
    optimizer = idist.auto_optim(make_optimizer(model))
    loader = idist.auto_dataloader(
        make_data(options), batch_size=options.batch_size * options.ranks, shuffle=True, pin_memory=False
    )

    def step(engine, batch):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()
        return loss

    Engine(step).run(loader, max_epochs=1)


if __name__ == "__main__":
    options = arguments()
    with idist.Parallel(backend="gloo" if options.ranks > 1 else None) as parallel:
        parallel.run(train, options)
