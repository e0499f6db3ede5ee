"""What an error of Ray's says in one line."""

import pytest
from ray.exceptions import ActorDiedError, RayActorError, RayTaskError

from pipeline.executors.answers import lost, one_line

HEADER = "\x1b[36mray::StreamActor.connect()\x1b[39m (pid=17969, ip=10.0.0.2, actor_id=17b7, repr=<StreamActor>)"
TRACEBACK = (
    HEADER
    + """
           ^^^^^^^^^^
  File "pipeline/executors/actors.py", line 6, in connect
    self._worker.connect(...)
ValueError: no such
model"""
)


def test_an_exception_in_a_worker_is_its_cause_and_not_rays_header() -> None:
    error = RayTaskError("connect", TRACEBACK, KeyError("the cause"))
    assert one_line(error) == "KeyError: 'the cause' (in connect on 10.0.0.2)"
    assert "did not join the data plane: KeyError: 'the cause' (in" in str(lost("join the data plane", error))


def test_a_cause_that_did_not_travel_is_read_from_the_traceback() -> None:
    died = ActorDiedError(RayTaskError("connect", TRACEBACK, None))
    assert str(died).startswith("The actor died because of an error raised in its creation task, ")
    assert one_line(died) == "ValueError: no such model (in connect on 10.0.0.2)"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayActorError(), "The actor experienced an error before finishing this task."),
        (ConnectionError("\n  it is gone  \nmore"), "it is gone"),
        (ConnectionError(""), "ConnectionError"),
    ],
)
def test_other_errors_are_their_first_line(error: Exception, said: str) -> None:
    assert one_line(error) == said
