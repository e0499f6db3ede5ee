"""How a task is split over the ranks of a worker group, and how their reports are merged into one result."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from graphs.quickstart import graph
from pipeline.data_plane.memory import MemoryPlane
from pipeline.declare.columns import Ragged
from pipeline.declare.fields import Field
from pipeline.declare.handle import KVBatchMeta, keys_of
from pipeline.declare.ranks import RankLayout, Ranks
from pipeline.declare.sharding import Dynamic, Packed, Plain, Shard, Sharding
from pipeline.declare.task import Task
from pipeline.engine.handles import HandleTable
from pipeline.errors import DataPlaneError, Problem, StageError
from pipeline.executors import merged, shards
from pipeline.executors.answers import not_started
from pipeline.executors.inputs import SHARD
from pipeline.executors.outputs import TaskResult
from pipeline.plan.planner import plan
from pipeline.record import trace
from tests.examples import few

TASK = Task(stage="prev_logprobs", step=4, groups=(0, 1, 2, 3))


def planned(samples: int, equal: bool = False) -> Any:
    made = plan(graph())[0].stage("prev_logprobs")
    return msgspec.structs.replace(made, sharding=Sharding.of(Plain(samples), equal=equal))


def handle() -> KVBatchMeta:
    lengths = {"P": (1, 2, 3, 4, 5, 6, 7, 8), "T": (8, 7, 6, 5, 4, 3, 2, 1)}
    return KVBatchMeta(keys=keys_of((0, 1, 2, 3), 2), partition_id="g", fields=(), lengths=lengths)


def test_every_rank_gets_its_samples_and_how_it_cuts_them() -> None:
    made = shards(planned(2), TASK, handle(), replicas=2)
    found = [msgspec.convert(part.extra_info[SHARD], Shard) for part in made]
    assert sorted(key for part in made for key in part.keys) == list(handle().keys)
    for part, shard in zip(made, found):
        assert part.keys == tuple(handle().keys[i] for i in shard.index)
        assert part.lengths["T"] == tuple(handle().lengths["T"][i] for i in shard.index)
        assert (shard.rank, shard.ranks) == (found.index(shard), 2)
        assert msgspec.convert(KVBatchMeta.decode(part.encode()).extra_info[SHARD], Shard) == shard
    assert handle().extra_info == {}


def test_samples_of_a_group_share_their_prompt_if_the_stage_can() -> None:
    """Two samples of each of four groups; the second group has prompts of different lengths."""
    whole = msgspec.structs.replace(handle(), lengths={"P": (5, 5, 4, 3, 6, 6, 7, 7), "T": (2,) * 8})
    for shares in (False, True):
        stage = msgspec.structs.replace(planned(0), sharding=Sharding.of(Packed(30), shares=shares))
        (part,) = shards(stage, TASK, whole, replicas=1)
        shard = msgspec.convert(part.extra_info[SHARD], Shard)
        runs = {row.shared for update in shard.updates for row in update.microbatches}
        assert sum(shard.spared(whole.lengths["P"])) == (18 if shares else 0), runs


def test_a_batch_that_cannot_be_divided_is_an_error_of_the_stage() -> None:
    with pytest.raises(StageError, match="the batch of stage 'prev_logprobs' at step 5 cannot be divided"):
        shards(planned(2, equal=True), TASK, handle(), replicas=3)


def result(samples: int, **values: Any) -> TaskResult:
    return TaskResult(task=TASK, samples=samples, **values)


def test_metrics_of_ranks_are_weighted_by_samples() -> None:
    whole = merged(TASK, [result(3, metrics={"a/b": 1.0}), result(1, metrics={"a/b": 5.0})])
    assert (whole.samples, whole.metrics) == (4, {"a/b": 2.0})


def test_handles_and_events_of_all_ranks_are_kept_and_the_first_error() -> None:
    spans = [
        trace.Ran(
            task=1,
            stage="s",
            step=0,
            attempt=0,
            group="g",
            worker=i,
            groups=(),
            start_s=0,
            end_s=1,
            cpu_s=0,
            metrics={},
        )
        for i in range(2)
    ]
    error = StageError(Problem(where="w", what="w", why="w", fix="f"))
    parts = [result(1, handles=[handle()], events=[spans[0]]), result(1, events=[spans[1]], error=error)]
    whole = merged(TASK, parts)
    assert (whole.handles, whole.events, whole.error) == ([handle()], spans, error)


def test_ranks_that_serve_different_weights_are_an_error() -> None:
    assert merged(TASK, [result(0, weights=(3, "aa")), result(0, weights=(3, "aa"))]).weights == (3, "aa")
    whole = merged(TASK, [result(0, weights=(3, "aa")), result(0, weights=(3, "bb"))])
    assert "its workers acknowledge different weights: version 3 aa, version 3 bb" in str(whole.error)


def test_ranks_count_tensor_parallel_first_then_context_data_and_pipeline() -> None:
    layout = RankLayout(data=2, tensor=2, context=2, pipeline=2)
    assert layout.size == 16
    assert layout.siblings(0) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert layout.siblings(1) == (4, 5, 6, 7, 12, 13, 14, 15)
    assert layout.peers(9) == (9, 13) == layout.peers(13)
    assert [Ranks(layout, rank).leads for rank in (0, 1, 4, 8, 12)] == [True, False, True, False, False]


@pytest.mark.parametrize(
    "layout", [RankLayout(data=3), RankLayout(data=2, tensor=3, pipeline=2), RankLayout(tensor=4, context=2)]
)
def test_siblings_and_peers_divide_the_ranks(layout: RankLayout) -> None:
    ranks = list(range(layout.size))
    assert sorted(rank for replica in range(layout.data) for rank in layout.siblings(replica)) == ranks
    assert sorted(rank for first in layout.siblings(0) for rank in layout.peers(first)) == ranks
    for rank in ranks:
        assert rank in layout.peers(rank) and rank in layout.siblings(layout.replica(rank))
        assert [layout.replica(peer) for peer in layout.peers(rank)] == list(range(layout.data))


def test_a_group_of_one_talks_to_nobody() -> None:
    ranks = Ranks()
    assert not ranks.connected and ranks.leads
    assert ranks.gather("x") == ["x"]
    assert ranks.totals({"a": 2.0, "b": 3.0}, largest=("b",)) == {"a": 2.0, "b": 3.0}
    assert ranks.share(lambda: {"text": ["t"]}) == {"text": ["t"]}
    ranks.agree("stage", 1)
    ranks.leave()


@settings(max_examples=few(40), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 4, 6]),
    st.sampled_from([Plain(), Plain(2), Dynamic(40), Packed(30)]),
    st.booleans(),
    st.randoms(),
)
def test_what_ranks_write_of_their_shards_is_read_in_canonical_order(lengths, ranks, microbatching, equal, order):
    """For any lengths, number of ranks and order of completion, every value belongs to its own key."""
    token = Field("token", dtype="int64", dims="N T")
    keys = keys_of((0, 1, 2, 3), 3)
    prompts, responses = zip(*lengths)
    given_lengths = {"P": prompts, "T": responses}
    whole = KVBatchMeta(keys=keys, partition_id="g", fields=(), lengths=given_lengths)
    stage = planned(0)
    stage = msgspec.structs.replace(stage, sharding=Sharding.of(microbatching, equal=equal))
    plane, table = MemoryPlane(), HandleTable(3)
    plane.register("g", [token], ["reader"])
    parts = shards(stage, TASK, whole, replicas=ranks)
    order.shuffle(parts)
    landed = []
    for part in parts:
        numbers = [keys.index(key) for key in part.keys]
        rows = [torch.full((responses[i],), i) for i in numbers]
        put = plane.put(part.keys, {"token": Ragged.of(rows)}, partition="g", stage="s", attempt=0, unit="batch")
        landed += table.add(put)
    assert sorted(landed) == [0, 1, 2, 3]
    found = table.handle((0, 1, 2, 3), ["token"])
    assert found is not None and found.keys == keys
    column = plane.get(found, ["token"], reader="reader")["token"]
    assert column.lengths == responses
    assert column.values.tolist() == [i for i in range(12) for _ in range(responses[i])]


def test_a_later_attempt_takes_the_place_of_what_an_earlier_one_put() -> None:
    """Whether the earlier attempt put all or some of its samples, none of its rows count and no handle names them."""
    plane, table = MemoryPlane(), HandleTable(2)
    plane.register("g", [Field("token", dtype="int32")], ["reader"])

    def put(samples: slice, attempt: int) -> tuple[int, ...]:
        keys = keys_of((0, 1), 2)[samples]
        columns = {"token": torch.full((len(keys),), attempt, dtype=torch.int32)}
        return table.add(plane.put(keys, columns, partition="g", stage="s", attempt=attempt, unit="batch"))

    assert put(slice(0, 3), 0) == (0,)
    assert put(slice(3, 4), 1) == (), "of group 1 the other sample is an earlier attempt's"
    assert put(slice(0, 2), 1) == (0,)
    assert put(slice(2, 3), 1) == (1,)
    found = table.handle((0, 1), ["token"])
    assert found is not None and found.attempt == 1
    assert {row.split(".")[1] for placement in found.placements for row in placement.rows} == {"1"}, "the attempt"
    assert plane.get(found, ["token"], reader="reader")["token"].tolist() == [1] * 4
    cleared = table.rows((0, 1))
    assert cleared is not None
    plane.clear(cleared)
    assert plane.row_count("g") == 0, "what it put goes with its groups"


def test_a_forgotten_group_leaves_no_count_of_its_samples() -> None:
    plane, table = MemoryPlane(), HandleTable(2)
    plane.register("g", [Field("token", dtype="int32")], ["reader"])

    def put(samples: int, attempt: int) -> tuple[int, ...]:
        keys, columns = keys_of((0,), 2)[:samples], {"token": torch.zeros(samples, dtype=torch.int32)}
        return table.add(plane.put(keys, columns, partition="g", stage="s", attempt=attempt, unit="batch"))

    assert put(1, 0) == () and table.complete(["token"]) == []
    table.forget([0])
    assert put(2, 1) == (0,) and table.complete(["token"]) == [0]


def test_fields_of_one_dimension_with_other_lengths_make_no_handle() -> None:
    """Neither stage reads the other's field, so that no worker notices: a reader of both would cut one wrongly."""
    plane, table = MemoryPlane(), HandleTable(2)
    plane.register("g", [Field(name, dtype="float32", dims="N T") for name in ("left", "right")], ["reader"])
    puts = {}
    for name, lengths in (("left", (2, 3)), ("right", (1, 3))):
        columns = {name: Ragged(torch.zeros(sum(lengths)), lengths)}
        puts[name] = plane.put(keys_of((0,), 2), columns, partition="g", stage=name, attempt=0, unit="batch")
    table.add(puts["left"])
    with pytest.raises(DataPlaneError, match=r"00000000_g000 has the length 1 in T, and 2 before"):
        table.add(puts["right"])
    table.add(msgspec.structs.replace(puts["right"], attempt=1))  # as if it had been made from another attempt's
    assert table.handle([0], ["left"]).lengths == {"T": (2, 3)}
    with pytest.raises(DataPlaneError, match=r"key 00000000_g000 has the lengths 2 and 1 in dimension T"):
        table.handle([0], ["left", "right"])


def test_lengths_are_those_of_the_later_attempt() -> None:
    plane, table = MemoryPlane(), HandleTable(2)
    plane.register("g", [Field("token", dtype="int32", dims="N T")], ["reader"])
    keys = keys_of((0,), 2)
    for attempt, lengths in enumerate([(3, 5), (4, 1)]):
        rows = Ragged.of([torch.zeros(length, dtype=torch.int32) for length in lengths])
        table.add(plane.put(keys, {"token": rows}, partition="g", stage="s", attempt=attempt, unit="group"))
    assert table.lengths(keys)["T"] == (4, 1) and table.longest((0,), "T") == (4,)


@pytest.mark.parametrize("groups", [(0,), (0, 1)], ids=["all known", "some known"])
def test_one_length_that_differs_among_known_and_new_ones_is_named(groups) -> None:
    table = HandleTable(2)

    def add(of: tuple[int, ...], lengths: tuple[int, ...]) -> None:
        keys = keys_of(of, 2)
        table.add(KVBatchMeta(keys=keys, partition_id="g", fields=(), lengths={"T": lengths}))

    add((0,), (3, 5))
    add(groups, (3, 5, 2, 7)[: 2 * len(groups)])
    assert table.lengths(keys_of(groups, 2))["T"] == (3, 5, 2, 7)[: 2 * len(groups)]
    with pytest.raises(DataPlaneError, match=r"00000000_g001 has the length 4 in T, and 5 before"):
        add(groups, (3, 4, 2, 7)[: 2 * len(groups)])
    table.forget(groups)
    assert table.lengths(keys_of((0,), 2)) == {}
    add((0,), (1, 1))
    assert table.longest((0,), "T") == (1,)


def test_rows_of_a_lost_attempt_go_with_their_group_and_once_more_at_the_end() -> None:
    token = Field("token", dtype="int32")
    plane, table = MemoryPlane(), HandleTable(2)
    plane.register("g", [token], ["reader"])

    def put(group: int, attempt: int) -> KVBatchMeta:
        columns = {"token": torch.zeros(2, dtype=torch.int32)}
        return plane.put(keys_of((group,), 2), columns, partition="g", stage="s", attempt=attempt, unit="group")

    assert table.late("g") is None
    put(0, 0)  # and dies before it reports
    table.lose((0, 1), 0)
    for group in (0, 1):
        table.add(put(group, 1))
    first = table.rows((0,))
    assert first is not None
    plane.clear(first)
    table.forget((0,))
    assert plane.row_count("g") == 1
    put(0, 0)  # that worker was still alive
    put(1, 0)
    late = table.late("g")
    assert late is not None
    plane.clear(late)
    assert plane.row_count("g") == 1


class DiedError(RayActorError):
    """An error with Ray's text of an actor that failed while it was created."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def __str__(self) -> str:
        frames = f'  File "{Path(torch.__file__)}", line 9, in f\n  File "{self.file}", line 3, in <module>\n'
        return f"The actor died because of an error raised in its creation task, \n{frames}OSError: no disk\n\n"


def test_an_actor_that_is_not_created_names_the_users_file() -> None:
    (own,) = not_started("TransferQueue", DiedError("/home/me/triton.py")).problems
    (ray,) = not_started("TransferQueue", DiedError(torch.__file__)).problems
    assert (own.where, ray.where) == ("/home/me/triton.py:3", "Ray")
    assert own.what == ray.what == "TransferQueue does not start: OSError: no disk"
    assert "rename" in own.fix and "rename" not in ray.fix
