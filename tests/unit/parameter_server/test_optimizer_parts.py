"""User optimizers on servers: attributes, contained optimizers, values changed by their own steps."""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from fabricx.parameter_server.divisible import needs_whole_tensors
from fabricx.parameter_server.optimizer_parts import (
    OptimizerSnapshot,
    flat_part,
    groups_of,
    load_from_servers,
    nested,
    part_of,
    sliced,
)
from fabricx.parameter_server.server.server import Server
from fabricx.parameter_server.wire.messages import Push, ReadState, ServerInit, Settings
from fabricx.parameter_server.wire.partition import Shard, divide

SHAPES = [[3, 4], [7], [1]]
STEPS = 6


def sign(values: Tensor) -> Tensor:
    return values.sign()


class Counting(optim.Optimizer):
    """Has attributes of its own (a function, a list, a counter), and a counter in its groups and state."""

    def __init__(self, params: Any, lr: float, *, warmup: int, rule: Callable[[Tensor], Tensor] = sign) -> None:
        super().__init__(params, {"lr": lr, "k": 0})
        self.warmup, self.rule, self.calls = warmup, rule, 0
        self.rates: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.state["total"] = self.state.get("total", 0) + self.calls  # type: ignore[index,arg-type,assignment]
        rate = min(1.0, self.calls / self.warmup)
        self.rates.append(rate)
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    last = self.state[p].setdefault("last", torch.zeros_like(p))
                    p.sub_(self.rule(p.grad) + last / group["k"], alpha=rate * group["lr"])
                    last.copy_(p.grad)

    def state_dict(self) -> Any:
        return {**super().state_dict(), "calls": self.calls, "rates": self.rates}


class LastOfAdam(optim.Adam):
    """Adam with additional state."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
                with torch.no_grad():
                    p.add_(self.state[p]["exp_avg"], alpha=-0.1 / self.state[p]["seen"])


class Lookahead(optim.Optimizer):
    """Wraps an optimizer and shares its groups. Zhang et al., NeurIPS 2019."""

    def __init__(self, optimizer: optim.Optimizer, k: int = 2) -> None:
        self.optimizer, self.k, self.count = optimizer, k, 0
        self.param_groups = optimizer.param_groups
        self.defaults = optimizer.defaults
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]
        self.state = optimizer.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for group, slow in zip(self.param_groups, self.slow, strict=True):
                for p, old in zip(group["params"], slow, strict=True):
                    old.lerp_(p, 0.5)
                    p.copy_(old)

    def state_dict(self) -> Any:
        return {"inner": self.optimizer.state_dict(), "slow": self.slow, "count": self.count}


class ByNorm(optim.Optimizer):
    """Steps each parameter separately, divided by its gradient's norm."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


class ByGlobalNorm(ByNorm):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        norm = nn.utils.get_total_norm([p.grad for group in self.param_groups for p in group["params"]])
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


def two_groups(params: list[Tensor]) -> list[dict[str, Any]]:
    return [{"params": params[:1]}, {"params": params[1:], "lr": 0.5}]


OPTIMIZERS: dict[str, Callable[[list[Any]], list[Any]]] = {
    "counting": lambda p: [Counting(two_groups(p), 0.1, warmup=4)],
    "subclass of adam": lambda p: [LastOfAdam(two_groups(p), lr=0.1)],
    "lookahead": lambda p: [Lookahead(optim.SGD(two_groups(p), lr=0.1, momentum=0.9))],
    "several": lambda p: [optim.Adagrad(p[:1], lr=0.1), Counting(p[1:], 0.1, warmup=2)],
    "foreach": lambda p: [optim.Adam(two_groups(p), lr=0.1, foreach=True, amsgrad=True, maximize=True)],
    "fused, rate in a tensor": lambda p: [optim.AdamW(two_groups(p), lr=torch.tensor(0.1), fused=True)],
    "by norm": lambda p: [ByNorm(p, lr=0.1)],
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def gradient(step: int, number: int, weights: Tensor) -> Tensor:
    return torch.randn(weights.shape, generator=torch.Generator().manual_seed(10 * step + number)) + weights / 3


def halve(step: int) -> float:
    return 0.5**step


def plain(make: Callable[[list[Any]], list[Any]]) -> tuple[list[Tensor], list[Any]]:
    weights = parameters()
    optimizers = make(weights)
    schedules = [optim.lr_scheduler.LambdaLR(optimizer, halve) for optimizer in optimizers]
    for step in range(STEPS):
        for number, parameter in enumerate(weights):
            parameter.grad = gradient(step, number, parameter.detach())
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
    return [parameter.detach() for parameter in weights], [optimizer.state_dict() for optimizer in optimizers]


class SimulatedServers:
    """A worker and servers without processes; messages are pickled."""

    def __init__(self, make: Callable[[list[Any]], list[Any]], servers: int, *, whole: bool) -> None:
        self.weights = parameters()
        self.optimizers = make(self.weights)
        self.schedules = [optim.lr_scheduler.LambdaLR(optimizer, halve) for optimizer in self.optimizers]
        self.shards = divide(SHAPES, servers, whole=whole)
        self.servers = [self.begin(shard) for shard in self.shards]

    def begin(self, shard: Shard) -> Server:
        server = Server(1)
        packed, pieces = sliced(self.optimizers, self.weights, shard)
        begin = ServerInit(Settings(1, aggregate=False), packed, pieces, shard, torch.float32, 0)
        server.handle(0, pickle.loads(pickle.dumps(begin)), torch.empty(0), torch.empty(0))
        return server

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.pull()
            for server, shard in zip(self.servers, self.shards, strict=True):
                inbox = torch.cat([torch.empty(0), *(
                    part_of(gradient(step, piece.parameter, self.weights[piece.parameter].detach()), piece).reshape(-1)
                    for piece in shard.pieces
                )])  # fmt: skip
                groups = pickle.loads(pickle.dumps(groups_of(nested(self.optimizers))))
                server.handle(0, Push(step, 1, (step,), groups=groups), inbox, torch.empty(0))
            for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
                optimizer._opt_called = True
                schedule.step()
        self.pull()

    def pull(self) -> None:
        for server, shard in zip(self.servers, self.shards, strict=True):
            for piece, (start, stop) in zip(shard.pieces, shard.spans, strict=True):
                part = part_of(self.weights[piece.parameter], piece)
                part.copy_(server.values[start:stop].view(part.shape))

    def states(self) -> list[Any]:
        answers = [server.handle(0, ReadState("optimizers"), *[torch.empty(0)] * 2).content for server in self.servers]
        load_from_servers(self.optimizers, self.weights, pickle.loads(pickle.dumps(answers)))
        return [optimizer.state_dict() for optimizer in self.optimizers]


def same(first: Any, other: Any, close: float = 0.0) -> bool:
    if isinstance(first, Tensor):
        return torch.allclose(first, other, rtol=close, atol=close)
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(same(value, other[key], close) for key, value in first.items())
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(same(a, b, close) for a, b in zip(first, other, strict=True))
    return bool(first == other)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")  # torch does not detect a wrapper's own step
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_on_servers_is_bitwise_equal_to_a_plain_loop(name: str) -> None:
    make = OPTIMIZERS[name]
    wanted, states = plain(make)
    for servers, whole in [(1, False), (2, True)] + ([] if name == "by norm" else [(3, False)]):
        if name == "lookahead" and servers > 1:
            continue  # its slow weights are an attribute: refused below
        # Fused steps round the remainder of a vector, after the last whole register, differently.
        close = 1e-6 if name.startswith("fused") and not whole else 0.0
        served = SimulatedServers(make, servers, whole=whole)
        served.steps(0, STEPS)
        assert same([w.detach() for w in served.weights], wanted, close), (servers, whole)
        assert same(served.states(), states, close), (servers, whole)


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
@pytest.mark.parametrize("name", ["counting", "lookahead", "subclass of adam"])
def test_a_snapshot_and_a_checkpoint_keep_attributes(name: str) -> None:
    make = OPTIMIZERS[name]
    wanted, states = plain(make)
    served = SimulatedServers(make, 1, whole=False)
    served.steps(0, 3)
    before = groups_of(nested(served.optimizers))
    remembered = OptimizerSnapshot(served.optimizers)
    served.states()
    remembered.restore()
    assert groups_of(nested(served.optimizers)) == before  # a worker's copy is unchanged: only the server steps
    file = io.BytesIO()
    torch.save(served.servers[0].snapshot(), file)
    served.servers[0].restore(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
    served.steps(3, 5)
    served.states()  # and then to a new server, as in a resumed run
    served.servers = [served.begin(served.shards[0])]
    served.steps(5, STEPS)
    assert same([w.detach() for w in served.weights], wanted)
    assert same(served.states(), states)


def whole(make: Callable[[list[Any]], list[Any]], servers: int, shard_by: Any = "auto", **more: Any) -> bool:
    weights = parameters()
    return needs_whole_tensors(make(weights), weights, servers, shard_by, **more)


def test_declared_properties_of_optimizers_are_verified() -> None:
    assert not whole(lambda p: [optim.AdamW(p)], 2)
    assert whole(lambda p: [optim.Adafactor(p), optim.AdamW(p)], 2)
    assert not whole(OPTIMIZERS["counting"], 2, "element")
    assert whole(OPTIMIZERS["by norm"], 2, "tensor")
    assert not whole(lambda p: [ByGlobalNorm(p, lr=0.1)], 1)  # nothing is divided
    for make, servers, shard_by, message in [
        (OPTIMIZERS["counting"], 2, "auto", r"whether Counting steps each element .* set servers=1"),
        (OPTIMIZERS["by norm"], 2, "element", r"ByNorm steps parts differently from the whole.* or shard_by='tensor'"),
        (lambda p: [ByGlobalNorm(p, lr=0.1)], 2, "tensor", r"ByGlobalNorm steps parts differently"),
        (OPTIMIZERS["lookahead"], 2, "element", r"Lookahead steps parts differently"),
        (lambda p: [optim.Muon(p[:1])], 2, "element", r"Muon steps whole parameters"),
        (lambda p: [optim.LBFGS(p)], 1, "tensor", r"LBFGS computes the loss several times"),
    ]:
        with pytest.raises(ValueError, match=message):
            whole(make, servers, shard_by)
    with pytest.raises(ValueError, match="sparse embeddings"):
        whole(OPTIMIZERS["counting"], 2, "element", tables=frozenset({0}))


def test_steps_that_servers_would_not_make_are_refused() -> None:
    def hooked(p: list[Any]) -> list[Any]:
        optimizer = optim.SGD(p, lr=0.1)
        optimizer.register_step_post_hook(lambda *args: None)
        return [optimizer]

    def replaced(p: list[Any]) -> list[Any]:
        optimizer = optim.SGD(p, lr=0.1)
        optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
        return [optimizer]

    for make in (hooked, replaced):
        with pytest.raises(ValueError, match="has step hooks, or a replaced step"):
            whole(make, 1)

    def scheduled(p: list[Any]) -> list[Any]:
        optimizer = optim.SGD(p, lr=0.1)
        optim.lr_scheduler.StepLR(optimizer, 1)  # replaces its step too, which changes nothing
        return [optimizer]

    assert not whole(scheduled, 2)
    weights = parameters()
    optimizer = Counting(weights, 0.1, warmup=1, rule=lambda values: values)
    shard = divide(SHAPES, 1)[0]
    packed, made = sliced([optimizer], weights, shard)
    assert packed.unpack(made)[0].rule([2.0]) == [2.0]  # a lambda is sent by value
    optimizer.rule = threading.Lock()
    with pytest.raises(ValueError, match="an attribute of Counting can't be sent to a server"):
        sliced([optimizer], weights, shard)


DAMPED: dict[str, Callable[[list[Any]], list[Any]]] = {
    **OPTIMIZERS,
    "sgd": lambda p: [optim.SGD(p, lr=0.1)],
    "momentum": lambda p: [optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True)],
    "adam": lambda p: [optim.Adam(p, lr=0.1, weight_decay=0.1)],
    "adamw": lambda p: [optim.AdamW(p, lr=0.1, weight_decay=0.1)],
    "rmsprop": lambda p: [optim.RMSprop(p, lr=0.1, momentum=0.5)],
    "rprop": lambda p: [optim.Rprop(p, lr=0.1)],
    "asgd": lambda p: [optim.ASGD(p, lr=0.1)],
}


@pytest.mark.parametrize("name", DAMPED)
def test_a_stale_gradient_scales_the_step_down(name: str) -> None:
    def moved(*, damp: bool) -> tuple[list[Tensor], list[Any]]:
        served = SimulatedServers(DAMPED[name], 1, whole=False)
        [server] = served.servers
        server.init.settings.damp = damp
        served.steps(0, 2)
        before = server.values.clone()
        server.state.shard.version += (
            5  # updates of other workers, which this test omits: the gradient below is 5 updates old
        )
        server.state.order.record_pull(0, server.version - 5)
        inbox = torch.linspace(-3, 5, len(before))
        server.handle(0, Push(2, 1, (2,), groups=groups_of(nested(served.optimizers))), inbox, torch.empty(0))
        return [server.values - before], served.states()

    (whole,), states = moved(damp=False)
    (part,), damped_states = moved(damp=True)
    assert float(whole.abs().max()) > 0.01
    assert torch.allclose(part, whole / 5, rtol=1e-4, atol=1e-6)  # differences of weights in float32
    if name != "lookahead":  # which has its slow weights in its state
        assert same(damped_states, states)  # moments see the whole gradient


def test_a_server_without_parameters_has_an_empty_part() -> None:
    shards = divide([[4], [1]], 3, whole=True)
    parts = [flat_part([torch.ones(4), torch.ones(1)], shard) for shard in shards]
    assert [len(part) for part in parts] == [4, 1, 0]
