"""The order of an epoch and how it is dealt to ranks: nothing lost, nothing twice, at any cut and any world size."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitfw.data.order import Draw, TrainOrder, epoch_order, eval_order, quota_order


def make(num_samples=32, *, batch=4, device=1, seed=0, **options):
    return TrainOrder(num_samples=num_samples, global_batch=batch, images_per_device=device, seed=seed, **options)


def global_batches(world, *, device, batch, start=(0, 0), steps=None, **options):
    """What all ranks together do: a list of steps, each a list of micro-batches g = micro * world + rank."""
    ranks = []
    for rank in range(world):
        order = make(batch=batch, device=device, rank=rank, world=world, **options)
        order.seek(epoch=start[0], images=start[1])
        ranks.append((order.accumulation, list(order)))
    accumulation = ranks[0][0]
    found = []
    for step in range(len(ranks[0][1]) // accumulation):
        found.append(
            [ranks[rank][1][step * accumulation + micro] for micro in range(accumulation) for rank in range(world)]
        )
    return found[:steps]


def flat(steps):
    return [draw.index for step in steps for micro in step for draw in micro]


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum),
    window=st.integers(0, 13),
    seed=st.integers(0, 9),
)
def test_epoch_order__each_row_once_and_windows_hold_whole_shards(sizes, window, seed):
    order = epoch_order(sizes, seed=seed, epoch=3, window=window)
    assert np.array_equal(np.sort(order), np.arange(sum(sizes)))
    assert np.array_equal(order, epoch_order(sizes, seed=seed, epoch=3, window=window))
    if window:
        shard = np.repeat(np.arange(len(sizes)), sizes)[order]
        position = {number: np.flatnonzero(shard == number) for number in set(shard)}
        for place in position.values():  # a shard's rows lie within the rows of `window` shards
            assert place[-1] - place[0] < sum(sorted(sizes)[-window:])


@pytest.mark.parametrize("window", [0, 2])
def test_epoch_order__p21_p22_changes_with_epoch_and_seed_only(window):
    sizes = [10] * 8
    orders = [tuple(epoch_order(sizes, seed=1, epoch=epoch, window=window)) for epoch in range(3)]
    assert len(set(orders)) == 3
    assert orders == [tuple(epoch_order(sizes, seed=1, epoch=epoch, window=window)) for epoch in range(3)]
    shards = [tuple(dict.fromkeys(np.array(order) // 10)) for order in orders]
    assert len(set(shards)) == 3
    assert tuple(epoch_order(sizes, seed=2, epoch=0, window=window)) != orders[0]


def test_epoch_order__p85_batches_are_no_neighbours():
    sizes = [25] * 4  # one class a shard
    order = epoch_order(sizes, seed=0, epoch=0, window=64)
    for batch in order.reshape(10, 10):
        assert len(set(batch // 25)) > 1
    assert np.abs(np.diff(order)).mean() / 100 > 0.2


@pytest.mark.parametrize(
    ("first", "then"), [((2, 2), (1, 2)), ((1, 2), (2, 2)), ((2, 1), (4, 1)), ((1, 4), (2, 1)), ((4, 2), (1, 8))]
)
@pytest.mark.parametrize("repeats", [1, 3])
def test_resume__p01_p51_every_cut_and_other_world_sizes_continue_the_epoch(first, then, repeats):
    options = {"batch": 8, "num_samples": 45, "shard_sizes": [20, 3, 22], "window": 2, "repeats": repeats}
    uncut = global_batches(first[0], device=first[1], **options)
    for cut in range(len(uncut) + 1):
        head = global_batches(first[0], device=first[1], steps=cut, **options)
        tail = global_batches(then[0], device=then[1], start=(0, cut * 8), **options) if cut < len(uncut) else []
        assert len(head) + len(tail) == 5
        for mine, wanted in zip(head + tail, uncut, strict=True):  # each global batch holds the same draws
            assert sorted(chain.from_iterable(mine)) == sorted(chain.from_iterable(wanted))
        if repeats == 1:
            assert flat(head + tail) == flat(uncut) and len(set(flat(uncut))) == 40


def test_resume__p52_boundary_is_the_next_epoch():
    order = make(21, batch=4)
    assert order.steps_per_epoch == 5 and order.dropped == 1
    order.seek(epoch=0, images=20)
    assert order.position == (1, 0)
    assert next(iter(order))[0].epoch == 1
    order.seek(epoch=2, images=16)
    assert len(list(order)) == 4 and order.position == (3, 0)
    with pytest.raises(ValueError, match=r"images=22 lies outside this data set of 21 images"):
        order.seek(epoch=0, images=22)


def test_resume__another_global_batch_goes_on_at_the_same_image():
    uncut = flat(global_batches(1, device=4, batch=4))
    order = make(32, batch=8, device=8)
    order.seek(epoch=0, images=12)
    rest = [draw.index for micro in order for draw in micro]
    assert rest == uncut[12:28]  # two whole batches of 8; four are left over


def test_iteration__rolls_over_when_it_begins_and_only_once():
    order = make(8, batch=4, device=4)
    iter(order), iter(order)  # torch's loader makes two and uses one
    assert order.position == (0, 0)
    first = iter(order)
    assert next(first)[0].epoch == 0 and order.position == (1, 0)  # left in the middle
    assert [draw.epoch for micro in order for draw in micro] == [1] * 8
    assert len(order) == 2


def test_layout__micro_batches_are_places_of_the_global_batch():
    two = global_batches(2, device=2, batch=8, num_samples=16)
    one = global_batches(1, device=2, batch=8, num_samples=16)
    assert two == one  # the same micro-batches g in the same order
    assert flat(two) == list(epoch_order([16], seed=0, epoch=0))


@pytest.mark.parametrize(("num_samples", "batch", "device", "world"), [(20, 4, 1, 2), (100, 8, 4, 2), (12, 4, 2, 1)])
def test_length__p02_p19_p32_depends_on_samples_and_batch_only(num_samples, batch, device, world):
    for shard_sizes in ([num_samples], [num_samples - 3, 1, 2]):
        orders = [
            make(num_samples, batch=batch, device=device, rank=r, world=world, shard_sizes=shard_sizes)
            for r in range(world)
        ]
        assert {(o.steps_per_epoch, o.dropped, len(o), len(list(o))) for o in orders} == {
            (
                num_samples // batch,
                num_samples % batch,
                len(orders[0]),
                num_samples // batch * (batch // device // world),
            )
        }


def test_repeats__p74_length_and_spread():
    order = make(100, batch=8, device=4, world=2, repeats=3)
    assert order.steps_per_epoch == 12 and order.distinct == 34
    assert "34 different images in an epoch, each 3 times" in order.describe()
    assert "4 of 100 dropped" in order.describe()
    index, repeat = order.draws(0)
    assert len(index) == 100 and len(set(index)) == 34 and set(repeat) == {0, 1, 2}
    seen = set()
    for epoch in range(12):
        seen |= set(order.draws(epoch)[0])
    assert len(seen) > 95  # a third of the images each epoch: (2/3) ** 12 = 0.8 % not seen
    steps = global_batches(4, device=2, batch=8, num_samples=99, repeats=3)
    for step in steps:  # 4 ranks: the copies of one image are on different ranks
        for micro in step:
            assert len({draw.index for draw in micro}) == len(micro)
    assert make(3, batch=3, device=3, repeats=3).distinct == 1  # never zero


def test_quota__balanced_and_weighted_draws():
    groups = [np.arange(90), np.arange(90, 100)]
    rows = quota_order(groups, [1, 1], 100, seed=0, epoch=0)
    counts = np.bincount(rows, minlength=100)
    assert counts[:90].sum() == counts[90:].sum() == 50
    assert counts[:90].max() == 1 and set(counts[90:]) == {5}  # used up whole before coming again
    assert not np.array_equal(rows, quota_order(groups, [1, 1], 100, seed=0, epoch=1))
    thirds = quota_order(groups, [2, 1], 100, seed=0, epoch=0)
    assert (thirds < 90).sum() == 67 and len(thirds) == 100
    order = make(100, batch=10, device=10, groups=groups, shares=[1, 1])
    assert sum(draw.index < 90 for micro in order for draw in micro) == 50


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch": 6, "device": 4}, r"global_batch=6 is not a multiple of machine.images_per_device=4 x 1 process"),
        ({"batch": 64, "device": 64}, r"32 samples, fewer than one global batch of 64"),
        ({"num_samples": 0}, r"0 samples, fewer than one global batch"),
        ({"repeats": 0}, r"augment.repeats=0"),
        ({"repeats": 3, "groups": [np.arange(32)], "shares": [1.0]}, "both repeat images"),
    ],
)
def test_order__refused(options, words):
    with pytest.raises(ValueError, match=words):
        make(**options)


@settings(deadline=None, max_examples=60)
@given(num_samples=st.integers(1, 40), world=st.integers(1, 5), batch=st.integers(1, 7))
def test_eval_order__p15_each_sample_once_and_equal_batches(num_samples, world, batch):
    ranks = [eval_order(num_samples, batch=batch, rank=rank, world=world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(len(members) == batch for batches in ranks for members in batches)
    rows = [draw.index for batches in ranks for members in batches for draw in members]
    assert sorted(row for row in rows if row >= 0) == list(range(num_samples))
    assert isinstance(ranks[0][0][0], Draw)


def test_eval_order__no_sample():
    with pytest.raises(ValueError, match="no sample"):
        eval_order(0, batch=4)
