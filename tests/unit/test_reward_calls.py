"""How reward functions are called: instances, batched ones, and async ones against a real local HTTP service."""

import asyncio
import gc
import threading
from dataclasses import dataclass

import cloudpickle
import pytest
import torch
from aiohttp import ClientSession, web

from ops.rewards import SampleError, batched, exact_match
from pipeline import Graph, Schedule, StageContext, StageError, Task, WorkerGroup
from pipeline.engine.termination import Termination
from stages.prompts import Prompts
from stages.reward import Reward
from stages.tasks import Generated

torch.set_num_threads(1)
COLUMNS = {"response": ["12", "13", "", "99"], "answer": ["12", "12", "12", "12"]}


def set_up(stage, group_size=2):
    context = StageContext(group=WorkerGroup("host"), rank=0, seed=0, group_size=group_size, run_dir=None, shared={})
    runner = stage.setup(context)
    return lambda columns=COLUMNS: runner(columns, Task(stage="reward", step=0, groups=(7, 9)))


def run(stage, columns=COLUMNS):
    return set_up(stage)(columns)


def problems(stage):
    graph = Graph(name="g", source=Prompts(Generated()), stages=(stage,), schedule=Schedule(steps=1))
    return [str(problem) for problem in stage.check(graph)]


@dataclass(frozen=True)
class ShortEnough:
    limit: int

    def __call__(self, response: str) -> float:
        return float(len(response) <= self.limit)


def test_an_instance_is_a_function_named_by_its_class():
    stage = Reward(ShortEnough(1), exact_match)
    assert problems(stage) == []
    assert [field.name for field in stage.writes] == ["reward", "reward_short_enough", "reward_exact_match"]
    out = run(cloudpickle.loads(cloudpickle.dumps(stage)))
    assert out.columns["reward_short_enough"].tolist() == [0, 0, 1, 0]
    assert out.metrics["short_enough"] == 0.25
    with pytest.raises(StageError, match=rf"^{__file__}:\d+: reward short_enough raised TypeError"):
        run(Reward(ShortEnough("x")))


def leaves(how: str):
    raise {"exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[how]


@pytest.mark.parametrize(("how", "said"), [("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")])
@pytest.mark.parametrize("form", ["plain", "batched", "async"])
def test_a_function_that_leaves_python_is_an_error_of_its_own(form, how, said):
    """sys.exit() and KeyboardInterrupt would end the worker's event loop."""

    def plain(response):
        leaves(how)

    async def waits(response):
        leaves(how)

    function = {"plain": plain, "batched": batched(plain), "async": waits}[form]
    raised = []

    def call():
        try:
            run(Reward(function))
        except BaseException as error:  # noqa: BLE001 - what the thread raised
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert type(raised[0]) is StageError and f"raised {said}" in str(raised[0])


@pytest.mark.usefixtures("signals_are_not_ignored")
def test_ctrl_c_in_a_function_passes_through_unless_a_run_takes_it():
    with pytest.raises(KeyboardInterrupt):
        run(Reward(lambda response: leaves("interrupt")))
    with Termination(), pytest.raises(StageError, match="raised KeyboardInterrupt"):
        run(Reward(lambda response: leaves("interrupt")))


class Own(BaseException):
    """What few catch."""


@pytest.mark.parametrize(
    "raised", [GeneratorExit, asyncio.CancelledError, Own, lambda: BaseExceptionGroup("", [Own()])]
)
@pytest.mark.parametrize("form", ["plain", "batched", "async"])
def test_whatever_a_function_raises_is_an_error_of_its_own(form, raised):
    def plain(response):
        raise raised()

    async def waits(response):
        raise raised()

    if form == "async" and raised is GeneratorExit:
        return  # it closes the coroutine
    function = {"plain": plain, "batched": batched(plain), "async": waits}[form]
    with pytest.raises(StageError, match=f"raised {type(raised()).__name__}"):
        run(Reward(function))


def test_two_instances_of_one_class_need_two_names():
    assert "2 reward functions are named short_enough" in problems(Reward(ShortEnough(1), ShortEnough(2)))[0]


def test_a_class_is_no_reward():
    stage = Reward(ShortEnough)
    assert problems(stage) == [
        f"{stage.location}: ShortEnough is a class; calling it makes an instance, not a reward. "
        "Fix: pass an instance: ShortEnough(...)"
    ]


def test_a_partial_has_no_name():
    from functools import partial

    assert "has no name of its own" in problems(Reward(partial(exact_match, answer="1")))[0]


@dataclass(frozen=True)
class Connected:
    log: list

    def __call__(self, response):
        raise AssertionError("what open() returns is called")

    def open(self):
        self.log.append("opened")
        return lambda response: float(len(response))


def test_what_open_returns_is_called_in_its_place():
    log = []
    scored = set_up(Reward(Connected(log)))
    assert log == ["opened"]
    assert scored().columns["reward"].tolist() == scored().columns["reward"].tolist() == [2, 2, 0, 2]
    assert log == ["opened"]


def test_a_batched_reward_gets_lists():
    @batched
    def share(response, answer, scale=2):
        assert answer == ["12"] * 4
        return [scale * response.count(text) / len(response) for text in response]

    stage = Reward(share, exact_match)
    assert problems(stage) == []
    assert run(stage, COLUMNS | {"response": ["a", "b", "a", "a"]}).columns["reward_share"].tolist() == [
        1.5,
        0.5,
        1.5,
        1.5,
    ]


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ([1.0] * 3, "returned [1.0, 1.0, 1.0] for 4 samples, called with response=['12', '13', '', '99']"),
        (1.0, "returned 1.0 for 4 samples"),
        ("1234", "returned '1234' for 4 samples"),
        ([1.0, 1.0, None, 1.0], "returned None for sample 2 of step 1 (group 9, member 0), called with response=''"),
        (SampleError(1, "too odd"), "raised SampleError: too odd for sample 1 of step 1 (group 7, member 1)"),
        (ValueError("too odd"), "raised ValueError: too odd for 4 samples"),
    ],
)
def test_a_batched_reward_that_fails(made, text):
    @batched
    def share(response):
        if isinstance(made, Exception):
            raise made
        return made

    with pytest.raises(StageError) as error:
        run(Reward(share))
    assert f"reward share {text}" in str(error.value)


class Service:
    """An HTTP judge that is slow, fails at first or hangs, depending on the text."""

    def __init__(self):
        self.asked, self.now, self.most = [], 0, 0

    async def answer(self, request):
        text = (await request.json())["text"]
        self.asked.append(text)
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if text == "hang":
                await asyncio.sleep(600)
            if text.startswith("flaky") and self.asked.count(text) < 3:
                return web.Response(status=503)
            await asyncio.sleep(0.02)
        finally:
            self.now -= 1
        return web.json_response({"score": len(text)})


@pytest.fixture
def service():
    made, loop, up = Service(), asyncio.new_event_loop(), threading.Event()

    async def start():
        app = web.Application()
        app.router.add_post("/", made.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"
        up.set()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)
    loop.close()


def judge_of(service):
    """Return an async reward that queries the service."""

    async def judge(response):
        async with ClientSession() as session, session.post(service.url, json={"text": response}) as reply:
            reply.raise_for_status()
            return (await reply.json())["score"]

    return judge


def texts(*made):
    return {"response": list(made), "answer": ["12"] * len(made)}


def test_async_calls_run_several_at_a_time_and_keep_their_order(service):
    stage = Reward(judge_of(service), exact_match, weights=(1, 10), concurrency=3)
    assert problems(stage) == []
    out = run(stage, texts(*["12", "a", "bbb", "cccc"] * 5))
    assert out.columns["reward_judge"].tolist() == [2, 1, 3, 4] * 5
    assert out.columns["reward"].tolist() == [12, 1, 3, 4] * 5
    assert service.most == 3
    assert out.metrics["judge_retries"] == 0


def test_calls_are_one_after_the_other_where_the_user_says_so(service):
    run(Reward(judge_of(service), concurrency=1), texts("1", "2", "3", "4"))
    assert service.most == 1
    assert service.asked == ["1", "2", "3", "4"]


def test_a_service_that_fails_at_first_is_asked_again(service):
    scored = set_up(Reward(judge_of(service), retries=2))
    out = scored(texts("flaky", "a", "flaky!", "b"))
    assert out.columns["reward"].tolist() == [5, 1, 6, 1]
    assert out.metrics["judge_retries"] == 1.0
    assert scored(texts("a", "b")).metrics["judge_retries"] == 0.0


def test_the_last_failure_is_an_error_that_names_the_sample(service):
    with pytest.raises(StageError) as error:
        run(Reward(judge_of(service)), texts("a", "flaky"))
    text = str(error.value)
    assert "reward judge raised ClientResponseError: 503" in text
    assert "for sample 1 of step 1 (group 7, member 1), called with response='flaky'; every sample needs" in text
    assert service.asked.count("flaky") == 1
    with pytest.raises(StageError, match=r"503.* at the last of 2 attempts for sample 0"):
        run(Reward(judge_of(service), retries=1), texts("flaky?"))


@pytest.mark.timeout(20)
def test_a_service_that_hangs_is_late(service):
    scored = set_up(Reward(judge_of(service), timeout_s=0.3, concurrency=1))
    with pytest.raises(StageError, match=r"reward judge did not return within 0.3 s for sample 1 of step 1"):
        scored(texts("a", "hang", "b"))
    assert "b" not in service.asked  # queued requests are not sent any more
    assert scored(texts("a", "b")).columns["reward"].tolist() == [1, 1]


@pytest.mark.timeout(20)
def test_a_function_that_cancels_itself_is_not_late():
    async def gone(response):
        raise asyncio.CancelledError

    with pytest.raises(StageError, match="reward gone raised CancelledError for "):
        run(Reward(gone), texts("a"))


def test_a_function_that_stops_the_loop_does_not_stop_the_others():
    async def stops(response):
        asyncio.get_running_loop().stop()
        await asyncio.sleep(0.01)
        return 1.0

    assert run(Reward(stops), texts("a", "b")).columns["reward"].tolist() == [1, 1]


def test_a_function_that_does_not_listen_to_its_cancellation_is_late_too():
    async def deaf(response):
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                if response == "stop":
                    raise

    with pytest.raises(StageError, match=r"reward deaf did not return within 0.05 s"):
        run(Reward(deaf, timeout_s=0.05), texts("go on", "stop"))


def test_what_a_function_keeps_open_stays_usable_from_step_to_step(service):
    sessions = []

    async def judge(response):
        if not sessions:
            sessions.append(ClientSession())
        async with sessions[0].post(service.url, json={"text": response}) as reply:
            return (await reply.json())["score"]

    scored = set_up(Reward(judge))
    assert [scored(texts("a", "bb")).columns["reward"].tolist() for _ in range(3)] == [[1, 2]] * 3
    loop = sessions[0]._loop
    loop.run_until_complete(sessions[0].close())
    del scored
    gc.collect()
    assert loop.is_closed()


def test_an_instance_may_be_async_and_its_number_is_checked():
    class Judge:
        async def __call__(self, response: str):
            return float("nan") if response == "13" else 1.0

    with pytest.raises(StageError, match="reward judge returned nan for sample 1 of step 1"):
        run(Reward(Judge(), retries=3))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"concurrency": 0}, "Reward has concurrency=0; it is a whole number, 1 or more. Fix: concurrency=16"),
        ({"timeout_s": 0}, "Reward has timeout_s=0; it is seconds, above 0. Fix: timeout_s=60.0"),
        ({"timeout_s": float("inf")}, "Reward has timeout_s=inf; it is seconds, above 0. Fix: timeout_s=60.0"),
        ({"retries": -1}, "Reward has retries=-1; it is a whole number, 0 or more. Fix: retries=0"),
        ({"retries": 1.5}, "Reward has retries=1.5; it is a whole number, 0 or more. Fix: retries=0"),
    ],
)
def test_problems_of_the_settings(settings, text):
    async def judge(response):
        return 1.0

    stage = Reward(judge, **settings)
    assert problems(stage) == [f"{stage.location}: {text}"]


def test_settings_that_do_nothing_are_refused():
    stage = Reward(exact_match, retries=1)
    assert problems(stage) == [
        f"{stage.location}: Reward has concurrency, timeout_s or retries and no async function; they apply to async "
        "functions only. Fix: omit them"
    ]


def test_async_and_batched_is_refused():
    @batched
    async def judge(response):
        return [1.0]

    assert "reward judge is async and batched" in problems(Reward(judge))[0]
