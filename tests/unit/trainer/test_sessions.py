import copy
import pickle
from typing import Any, cast

import pytest

import fabricx as fx
from fabricx.session.session import Session
from fabricx.trainer.sessions import Sessions


def test_a_fit_is_the_newest_fit_until_another_fit_begins():
    first, test, second = (cast(Session, name) for name in ("first fit", "test", "second fit"))
    sessions = Sessions()
    assert (sessions.newest, sessions.fit) == (None, None)
    sessions.begin(first, fits=True)
    sessions.begin(test, fits=False)
    assert (sessions.newest, sessions.fit) == (test, first)
    sessions.begin(second, fits=True)
    assert (sessions.newest, sessions.fit) == (second, second)


@pytest.mark.parametrize(
    "travels", [lambda sent: pickle.loads(pickle.dumps(sent)), copy.deepcopy], ids=["pickle", "copy"]
)
def test_sessions_are_not_sent_to_other_processes(travels: Any):
    sessions = Sessions()
    sessions.begin(cast(Session, object()), fits=True)
    assert travels(sessions).newest is None
    assert travels(sessions).fit is None


def test_a_trainer_that_is_sent_to_a_worker_has_no_session(tmp_path):
    trainer = fx.Trainer(default_root_dir=tmp_path, logger=False, enable_progress_bar=False)
    trainer._sessions.begin(cast(Session, lambda: "can't be pickled"), fits=True)
    sent = pickle.loads(pickle.dumps(trainer))
    with pytest.raises(RuntimeError, match="has no run in this process"):
        _ = sent.session
    assert sent.optimizers == []
