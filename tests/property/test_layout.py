"""Extents cut any buffer that can be cut into pieces that share nothing."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from kvadmit.config import Settings
from kvadmit.errors import UnsupportedError
from kvadmit.geometry import ExtentPlan, Placement, RankBuffer, describe_buffer, plan_extents
from kvadmit.vmm import ExtentLayout

granules = st.sampled_from([4096, 65536, 2 << 20])
strides = st.lists(st.integers(1, 64).map(lambda n: n * 512), min_size=1, max_size=6).map(tuple)


@st.composite
def rank_buffers(draw: st.DrawFn) -> RankBuffer:
    return RankBuffer(
        device=draw(st.sampled_from(["a", "b"])),
        granule_bytes=draw(granules),
        strides=draw(strides),
    )


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[RankBuffer], ExtentPlan, int, int]:
    """Return ranks, their plan, the planned block count and the blocks of the largest request."""
    ranks = draw(st.lists(rank_buffers(), min_size=1, max_size=3))
    blocks_max = draw(st.integers(2, 50_000))
    request_blocks = draw(st.integers(1, blocks_max))
    try:
        plan = plan_extents(
            ranks,
            Settings.parse({}),
            blocks_max=blocks_max,
            request_blocks=request_blocks,
            prefix_blocks=draw(st.integers(0, 300)),
        )
    except UnsupportedError:
        assume(False)
        raise
    return ranks, plan, blocks_max, request_blocks


def runs_of(layout: ExtentLayout) -> list[tuple[int, int]]:
    return [run for extent in range(layout.extents) for run in layout.runs(extent)]


@given(plans())
def test_extents_tile_the_buffer_of_every_rank(
    drawn: tuple[list[RankBuffer], ExtentPlan, int, int],
) -> None:
    ranks, plan, _, _ = drawn
    for rank, layout in zip(ranks, plan.layouts, strict=True):
        assert layout.buffer_bytes == plan.blocks * rank.block_bytes
        end = 0
        for offset, length in sorted(runs_of(layout)):
            assert offset == end
            assert offset % rank.granule_bytes == length % rank.granule_bytes == 0
            end = offset + length
        assert end == layout.buffer_bytes


@given(plans(), st.data())
def test_a_block_lies_in_the_extent_that_its_id_says(
    drawn: tuple[list[RankBuffer], ExtentPlan, int, int], data: st.DataObject
) -> None:
    ranks, plan, _, _ = drawn
    block = data.draw(st.integers(0, plan.blocks - 1))
    for rank, layout in zip(ranks, plan.layouts, strict=True):
        runs = layout.runs(block // plan.extent_blocks)
        base = 0
        for stride, (offset, length) in zip(rank.strides, runs, strict=True):
            first = base + block * stride
            assert offset <= first
            assert first + stride <= offset + length
            base += stride * plan.blocks


@given(plans())
def test_the_levels_of_a_plan_keep_their_order(
    drawn: tuple[list[RankBuffer], ExtentPlan, int, int],
) -> None:
    ranks, plan, blocks_max, request_blocks = drawn
    assert 1 <= plan.prefix <= plan.floor <= plan.cap <= plan.extents
    assert plan.blocks == plan.extents * plan.extent_blocks <= blocks_max
    assert plan.floor * plan.extent_blocks >= request_blocks + 1
    for device in {rank.device for rank in ranks}:
        assert plan.extent_bytes[device] == sum(
            layout.extent_bytes
            for rank, layout in zip(ranks, plan.layouts, strict=True)
            if rank.device == device
        )


@given(plans())
def test_the_planner_is_not_refused_by_what_it_chose(
    drawn: tuple[list[RankBuffer], ExtentPlan, int, int],
) -> None:
    """Naming the chosen size in the settings, at the chosen block count, gives the same plan."""
    ranks, plan, _, request_blocks = drawn
    chosen = max(layout.extent_bytes for layout in plan.layouts)
    again = plan_extents(
        ranks,
        Settings.parse({"extent": chosen}),
        blocks_max=plan.blocks,
        request_blocks=request_blocks,
        prefix_blocks=(plan.prefix - 1) * plan.extent_blocks + 1,
    )
    assert again == plan


@given(strides, st.integers(2, 1000), granules)
def test_a_layered_buffer_is_described_from_its_placements(
    layer_strides: tuple[int, ...], blocks: int, granule: int
) -> None:
    placements: list[Placement] = []
    base = 0
    for stride in layer_strides:
        placements.append(Placement(base, 1, 0, stride))
        base += stride * blocks
    found = describe_buffer(
        reversed(placements), device="a", granule_bytes=granule, buffer_bytes=base, blocks=blocks
    )
    assert found.strides == layer_strides
    strips = found.layout(blocks, 1).strips
    assert [(strip.base, strip.block_stride) for strip in strips] == [
        (placement.offset, placement.block_stride) for placement in placements
    ]
