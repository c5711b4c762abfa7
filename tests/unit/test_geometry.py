from __future__ import annotations

import pytest

from kvadmit.config import Settings
from kvadmit.errors import ConfigError, UnsupportedError
from kvadmit.geometry import (
    EXTENT_BLOCKS_MAX,
    ExtentPlan,
    Placement,
    RankBuffer,
    describe_buffer,
    plan_extents,
)
from kvadmit.units import GIB, KIB, MIB
from kvadmit.vmm import ExtentLayout, Strip

PAGE = 4 * KIB
CUDA = 2 * MIB


def cpu_buffer(device: str = "host", layers: int = 4, stride: int = 128 * KIB) -> RankBuffer:
    return RankBuffer(device=device, granule_bytes=PAGE, strides=(stride,) * layers)


def plan(
    *ranks: RankBuffer,
    blocks_max: int = 2048,
    request_blocks: int = 32,
    prefix_blocks: int = 3,
    **settings: object,
) -> ExtentPlan:
    return plan_extents(
        ranks or (cpu_buffer(),),
        Settings.parse(settings),
        blocks_max=blocks_max,
        request_blocks=request_blocks,
        prefix_blocks=prefix_blocks,
    )


class TestDescribeBuffer:
    def describe(self, *placements: Placement, buffer_bytes: int, blocks: int) -> RankBuffer:
        return describe_buffer(
            placements,
            device="host",
            granule_bytes=PAGE,
            buffer_bytes=buffer_bytes,
            blocks=blocks,
        )

    def test_layer_outermost_has_a_strip_per_layer(self) -> None:
        page, blocks = 128 * KIB, 100
        found = self.describe(
            Placement(offset=0, layers=4, layer_stride=page * blocks, block_stride=page),
            buffer_bytes=4 * page * blocks,
            blocks=blocks,
        )
        assert found.strides == (page,) * 4
        assert found.block_bytes == 4 * page

    def test_cache_groups_on_top_of_each_other_count_once(self) -> None:
        page, blocks = 64 * KIB, 10
        found = self.describe(
            Placement(0, 3, page * blocks, page),
            Placement(0, 2, page * blocks, page),
            buffer_bytes=3 * page * blocks,
            blocks=blocks,
        )
        assert found.strides == (page,) * 3

    def test_layers_of_two_sizes_one_behind_the_other(self) -> None:
        blocks = 10
        found = self.describe(
            Placement(2 * 8 * KIB * blocks, 1, 0, 4 * KIB),
            Placement(0, 2, 8 * KIB * blocks, 8 * KIB),
            buffer_bytes=20 * KIB * blocks,
            blocks=blocks,
        )
        assert found.strides == (8 * KIB, 8 * KIB, 4 * KIB)

    def test_block_outermost_is_one_strip(self) -> None:
        page, blocks = 64 * KIB, 10
        found = self.describe(
            Placement(0, 3, page, 3 * page),
            Placement(page, 1, page, 3 * page),
            buffer_bytes=3 * page * blocks,
            blocks=blocks,
        )
        assert found.strides == (3 * page,)

    @pytest.mark.parametrize(
        ("placement", "buffer_bytes", "text"),
        [
            # Heads outside blocks: a block is in two places of each layer.
            (Placement(0, 2, 8 * KIB * 10, 4 * KIB), 16 * KIB * 10, "leaves or shares"),
            (Placement(0, 2, 2 * KIB * 10, 4 * KIB), 8 * KIB * 10, "leaves or shares"),
            (Placement(0, 2, 4 * KIB * 10, 4 * KIB), 12 * KIB * 10, "covers"),
            (Placement(0, 1, 0, 4 * KIB), 4 * KIB * 10 + 1, "equal size"),
        ],
    )
    def test_a_layout_that_is_neither(
        self, placement: Placement, buffer_bytes: int, text: str
    ) -> None:
        with pytest.raises(UnsupportedError, match=text):
            self.describe(placement, buffer_bytes=buffer_bytes, blocks=10)

    def test_a_described_buffer_gives_the_same_layout_back(self) -> None:
        page, blocks = 128 * KIB, 96
        found = self.describe(
            Placement(0, 2, page * blocks, page), buffer_bytes=2 * page * blocks, blocks=blocks
        )
        assert found.layout(12, 8) == ExtentLayout(
            2 * page * blocks, 12, 8, (Strip(0, page), Strip(page * blocks, page))
        )


class TestExtentSize:
    def test_a_64th_of_the_buffer(self) -> None:
        found = plan()
        assert found.extents == 64
        assert found.extent_bytes == {"host": GIB // 64}

    def test_at_most_32_mib_per_rank(self) -> None:
        found = plan(blocks_max=40_000)
        assert found.layouts[0].extent_bytes == 32 * MIB

    def test_at_most_256_blocks(self) -> None:
        found = plan(cpu_buffer(layers=1, stride=PAGE), blocks_max=1_000_000)
        assert found.extent_blocks == EXTENT_BLOCKS_MAX

    def test_more_where_the_granule_forces_it(self) -> None:
        found = plan(
            RankBuffer(device="cuda", granule_bytes=CUDA, strides=(4 * KIB,) * 2),
            blocks_max=10_000,
            request_blocks=100,
        )
        assert found.extent_blocks == 512

    def test_32_layers_of_64_kib_on_cuda(self) -> None:
        """The example of the integration map: 64 MiB in 32 runs, or 2 MiB in one."""
        layered = RankBuffer(device="cuda", granule_bytes=CUDA, strides=(64 * KIB,) * 32)
        assert layered.unit_blocks == 32
        assert plan(layered, blocks_max=4096).layouts[0].extent_bytes == 64 * MIB
        blocked = RankBuffer(device="cuda", granule_bytes=CUDA, strides=(2 * MIB,))
        assert blocked.unit_blocks == 1
        assert plan(blocked, blocks_max=4096).layouts[0].extent_bytes == 32 * MIB

    def test_ranks_of_different_bytes_share_one_size(self) -> None:
        narrow = RankBuffer(device="a", granule_bytes=PAGE, strides=(6 * KIB,))
        wide = RankBuffer(device="b", granule_bytes=PAGE, strides=(10 * KIB,) * 3)
        assert (narrow.unit_blocks, wide.unit_blocks) == (2, 2)
        found = plan(narrow, wide, blocks_max=1000)
        assert found.extent_blocks % 2 == 0
        assert found.extent_bytes == {
            "a": found.extent_blocks * 6 * KIB,
            "b": found.extent_blocks * 30 * KIB,
        }

    def test_ranks_on_one_device_add_up(self) -> None:
        found = plan(cpu_buffer(), cpu_buffer())
        assert found.extent_bytes == {"host": 2 * found.layouts[0].extent_bytes}
        assert found.layouts[0] == found.layouts[1]

    def test_blocks_are_whole_extents_and_no_more_than_planned(self) -> None:
        found = plan(blocks_max=2047)
        assert found.blocks == found.extents * found.extent_blocks
        assert 2047 - found.extent_blocks < found.blocks <= 2047

    def test_rounding_leaves_room_for_the_largest_request(self) -> None:
        # 33 blocks for the request, 1 for the null block: extents of 3 would leave 33.
        found = plan(cpu_buffer(layers=1), blocks_max=34, request_blocks=33, prefix_blocks=1)
        assert found.blocks == 34
        assert found.floor == found.extents

    @pytest.mark.parametrize(
        ("blocks_max", "request_blocks"), [(511, 10), (1023, 10), (1025, 1024)]
    )
    def test_no_size_fits(self, blocks_max: int, request_blocks: int) -> None:
        buffer = RankBuffer(device="cuda", granule_bytes=CUDA, strides=(4 * KIB,))
        with pytest.raises(UnsupportedError, match="512 blocks"):
            plan(buffer, blocks_max=blocks_max, request_blocks=request_blocks)

    def test_a_size_of_the_users(self) -> None:
        assert plan(extent="4MiB").extent_blocks == 8
        assert plan(extent="256MiB").extent_blocks == 512

    @pytest.mark.parametrize(
        ("extent", "near"),
        [
            ("5MiB", ('"5MiB"', '"5.50MiB"')),
            ("100KiB", ('"512KiB"', '"1MiB"')),
            ("2GiB", ('"512MiB"',)),
        ],
    )
    def test_a_size_that_cannot_be_is_answered_with_those_that_can(
        self, extent: str, near: tuple[str, ...]
    ) -> None:
        given = extent if extent != "5MiB" else 5 * MIB + 4096
        with pytest.raises(ConfigError) as refusal:
            plan(extent=given)
        assert refusal.value.key == "extent"
        assert all(size in refusal.value.allowed for size in near)

    def test_a_size_that_leaves_too_few_blocks(self) -> None:
        with pytest.raises(ConfigError, match="33 of 34 blocks"):
            plan(
                cpu_buffer(layers=1),
                blocks_max=34,
                request_blocks=32,
                extent=5 * 128 * KIB,
            )


class TestLevels:
    """Extents of 8 blocks, 4 MiB each, 256 of them."""

    def plan(self, **given: object) -> ExtentPlan:
        return plan(extent="4MiB", **given)  # type: ignore[arg-type]

    def test_the_default_floor_is_one_request_and_the_null_block(self) -> None:
        assert self.plan(request_blocks=31).floor == 4
        assert self.plan(request_blocks=32).floor == 5

    @pytest.mark.parametrize(("blocks", "extents"), [(0, 1), (1, 1), (8, 1), (9, 2), (9999, 256)])
    def test_the_prefix_covers_what_warm_up_touches(self, blocks: int, extents: int) -> None:
        found = self.plan(prefix_blocks=blocks)
        assert found.prefix == extents
        assert found.floor >= found.prefix

    def test_the_default_cap_is_everything(self) -> None:
        assert self.plan().cap == 256

    def test_a_cap_in_bytes_counts_whole_extents_of_the_fullest_device(self) -> None:
        assert self.plan(cap="23MiB").cap == 5
        assert self.plan(cap="100GiB").cap == 256
        found = plan(cpu_buffer(), cpu_buffer(), extent="4MiB", cap="23MiB")
        assert found.cap == 2

    def test_the_default_floor_bows_to_the_cap(self) -> None:
        assert self.plan(request_blocks=100, cap="16MiB").floor == 4

    def test_a_cap_below_the_prefix_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="at least 8MiB") as refusal:
            self.plan(prefix_blocks=16, cap="7MiB")
        assert refusal.value.key == "cap"

    def test_a_floor_in_bytes_is_rounded_up(self) -> None:
        assert self.plan(floor="9MiB").floor == 3
        assert self.plan(floor=0).floor == 1

    def test_floor_and_cap_in_one_extent(self) -> None:
        found = self.plan(floor="5MiB", cap="7MiB")
        assert (found.floor, found.cap) == (1, 1)

    def test_a_floor_above_the_buffer_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="at most 1GiB") as refusal:
            self.plan(floor="1025MiB")
        assert refusal.value.key == "floor"

    def test_the_wire_says_the_same(self) -> None:
        found = self.plan(cap="64MiB")
        wire = found.wire()
        assert (wire.extents, wire.extent_blocks, wire.prefix) == (256, 8, 1)
        assert (wire.floor, wire.cap, wire.extent_bytes) == (5, 16, {"host": 4 * MIB})
