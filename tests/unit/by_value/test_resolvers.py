"""Configurations of OmegaConf take their resolvers along, since other processes don't execute the script."""

from __future__ import annotations

import pickle
import threading

import pytest
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from fabricx import by_value


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from omegaconf.basecontainer import BaseContainer

    monkeypatch.setattr(BaseContainer, "_resolvers", dict(BaseContainer._resolvers))
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)


def test_a_configuration_brings_its_resolvers() -> None:
    inner = OmegaConf.create({"factor": 3})
    OmegaConf.register_new_resolver("times", lambda number: number * inner.factor)  # refers to a configuration
    sent = by_value.dumps({"nested": OmegaConf.create({"a": 2, "b": ["${times:${..a}}"]}).b})
    OmegaConf.clear_resolvers()
    assert pickle.loads(sent)["nested"] == [6]
    assert OmegaConf.has_resolver("times")


def test_a_resolver_of_the_receiver_is_kept() -> None:
    OmegaConf.register_new_resolver("where", lambda: "there")
    sent = by_value.dumps(OmegaConf.create({"a": "${where:}"}))
    OmegaConf.register_new_resolver("where", lambda: "here", replace=True)
    assert pickle.loads(sent).a == "here"


def test_resolvers_that_can_not_be_sent_are_omitted() -> None:
    lock = threading.Lock()
    OmegaConf.register_new_resolver("locked", lambda: str(lock))
    OmegaConf.register_new_resolver("plain", lambda: 1)
    sent = by_value.dumps(OmegaConf.create({"a": "${plain:}"}))
    OmegaConf.clear_resolvers()
    assert pickle.loads(sent).a == 1
    assert not OmegaConf.has_resolver("locked")


def test_the_configuration_of_hydra_is_sent() -> None:
    config = OmegaConf.create({"hydra": OmegaConf.structured(HydraConf), "lr": 0.1})
    HydraConfig.instance().set_config(config)
    HydraConfig.get().runtime._set_flag("readonly", False)
    HydraConfig.get().runtime.output_dir = "runs/1"
    sent = by_value.dumps(by_value.RESOLVERS)
    HydraConfig.instance().cfg = None
    pickle.loads(sent)
    assert HydraConfig.get().runtime.output_dir == "runs/1"
