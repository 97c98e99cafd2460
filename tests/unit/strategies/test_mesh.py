"""Options of meshes, and their delegation to data parallelism; the process tests compare with a single process."""

from __future__ import annotations

import pickle

import pytest

import fabricx as fx
from fabricx.core.strategy_parts import MeasuresWaiting, ModelParallel, ShardsWeights, as_part
from fabricx.strategies import DDP, FSDP, ExpertMesh, LocalSGD, Mesh, ParameterServer, PipelineMesh, TensorMesh


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor": 0}, "tensor=0: set the number of ranks"),
        ({"tensor": None, "pipeline": None}, "only one axis can have all"),
        ({"tensor": None, "context": None}, "context=None and tensor=None"),
        ({"expert": True}, "expert=True: set the number of ranks"),
        ({"expert": 2, "tensor": 2}, "set tensor=1, or set expert=1"),
        ({"expert": 2, "data": "fsdp"}, "data=fsdp with expert isn't supported.*set data='ddp'"),
        ({"expert": None, "data": DDP()}, r"data=DDP\(...\) with expert"),
        ({"data": "dpd"}, "Did you mean 'ddp'"),
        ({"data": ParameterServer()}, "data=ParameterServer"),
        ({"data": LocalSGD(), "expert": 2}, r"data=LocalSGD\(...\) with expert"),
        ({"schedule": "1f2b"}, "Did you mean '1f1b'"),
        ({"data": FSDP(), "pipeline": 2}, r"data=FSDP\(...\): with a pipeline, data parallelism has no options"),
    ],
)
def test_wrong_options_are_errors_with_the_remedy(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(**options)  # type: ignore[arg-type]


def test_a_mesh_is_plain_data() -> None:
    for strategy in (
        Mesh(tensor=2, pipeline=2),
        ExpertMesh(expert=2),
        TensorMesh(data=FSDP()),
        PipelineMesh(microbatches=3),
    ):
        assert type(pickle.loads(pickle.dumps(strategy))) is type(strategy)


def test_a_mesh_has_the_traits_of_data_parallelism_unless_ranks_share_the_model() -> None:
    assert Mesh().traits == DDP().traits
    assert Mesh(data="fsdp").traits == FSDP().traits
    traits = Mesh(tensor=2).traits
    assert not traits.replicated
    assert traits.synchronous


def test_a_mesh_has_the_optional_parts_of_its_data_strategy() -> None:
    mesh = Mesh()
    assert as_part(mesh, MeasuresWaiting) is mesh.data_strategy
    assert as_part(mesh, ModelParallel) is mesh
    assert as_part(mesh, ShardsWeights) is mesh


def test_ranks_that_do_not_fit_are_an_error_before_any_process_starts() -> None:
    with pytest.raises(ValueError, match="tensor=2 needs a multiple of 2 ranks, and there are 3"):
        fx.Trainer(devices=3, strategy=Mesh(tensor=2))
    with pytest.raises(
        ValueError, match="expert=2 needs a multiple of 2 ranks, and there are 3: set devices to 2 or 4"
    ):
        fx.Trainer(devices=3, strategy=Mesh(expert=2))
