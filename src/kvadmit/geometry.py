"""Extent geometry: how many blocks make an extent, and how many extents there are.

Owns: the choice of extent size and block count for a group, and the levels that follow
from it (prefix, floor, cap). Must not know: vLLM's configuration objects (its door hands
in plain numbers), or how memory is mapped.

What must hold, for every strip s of every rank, with E blocks per extent and g that rank's
granule:  E * stride_s = 0 (mod g)  and  base_s = 0 (mod g).  Strips lie one behind the
other, so base_s = blocks * (strides before s), and with blocks a multiple of E the second
follows from the first. Extents then share no granule, and each is mapped on its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from kvadmit.config import Settings
from kvadmit.errors import ConfigError, UnsupportedError
from kvadmit.messages import Geometry
from kvadmit.units import MIB, ceil_div, format_bytes
from kvadmit.vmm import ExtentLayout, Strip

EXTENT_BYTES_MAX = 32 * MIB
"""Auto-chosen extents stay at or below this per rank, unless the granule forces more."""
EXTENT_BLOCKS_MAX = 256
"""The pool moves at most this many blocks in one scheduler step."""
EXTENTS_AIM = 64
"""A buffer is cut in about this many extents while they stay below EXTENT_BYTES_MAX."""
EXTENTS_MIN = 2
"""Extent 0 never leaves an instance, so with fewer there is nothing to lend."""


class Placement(msgspec.Struct, frozen=True):
    """Where one run of same-shaped layers lies: vLLM's `KVCacheTensor`, in its own terms.

    Block b of layer l starts at `offset + l * layer_stride + b * block_stride` bytes.
    """

    offset: int
    layers: int
    layer_stride: int
    block_stride: int


class RankBuffer(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's KV buffer, for any block count.

    `strides`: bytes per block in each strip, in address order; strip s starts at
    `blocks * sum(strides[:s])`. Block-outermost: one strip that holds whole blocks.
    Layer-outermost: one strip per layer.
    """

    device: str
    granule_bytes: int
    strides: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all strips."""
        return sum(self.strides)

    @property
    def unit_blocks(self) -> int:
        """Fewest blocks that fill whole granules in every strip."""
        return math.lcm(
            *(self.granule_bytes // math.gcd(stride, self.granule_bytes) for stride in self.strides)
        )

    def layout(self, extents: int, extent_blocks: int) -> ExtentLayout:
        """Return which bytes belong to which extent when there are `extents` of them."""
        blocks = extents * extent_blocks
        strips: list[Strip] = []
        base = 0
        for stride in self.strides:
            strips.append(Strip(base, stride))
            base += stride * blocks
        return ExtentLayout(base, extents, extent_blocks, tuple(strips))


class ExtentPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry of one group, the same on all its ranks.

    `extents`, `prefix`, `floor` and `cap` are in extents. `blocks` is what vLLM's block
    count has to be. `layouts` is by rank; `extent_bytes`: device -> bytes behind one extent,
    summed over the ranks on it.
    """

    extent_blocks: int
    extents: int
    blocks: int
    prefix: int
    floor: int
    cap: int
    layouts: tuple[ExtentLayout, ...]
    extent_bytes: dict[str, int]

    def wire(self) -> Geometry:
        """Return the part of the plan that the arbiter needs."""
        return Geometry(
            extents=self.extents,
            extent_blocks=self.extent_blocks,
            prefix=self.prefix,
            floor=self.floor,
            cap=self.cap,
            extent_bytes=dict(self.extent_bytes),
        )


def describe_buffer(
    placements: Iterable[Placement],
    *,
    device: str,
    granule_bytes: int,
    buffer_bytes: int,
    blocks: int,
) -> RankBuffer:
    """Return the RankBuffer behind a buffer that was planned for some block count.

    Placements of different cache groups may lie on top of each other, since a block id
    belongs to one group at a time. Raises UnsupportedError for a layout in which blocks are
    neither outermost nor directly inside their layer.
    """
    block_bytes, rest = divmod(buffer_bytes, blocks)
    if rest:
        raise UnsupportedError(
            f"the KV buffer of {buffer_bytes} bytes is not {blocks} blocks of equal size"
        )
    found = list(placements)
    if all(placement.block_stride == block_bytes for placement in found):
        return RankBuffer(device=device, granule_bytes=granule_bytes, strides=(block_bytes,))
    strips = sorted(
        {
            (placement.offset + layer * placement.layer_stride, placement.block_stride)
            for placement in found
            for layer in range(placement.layers)
        }
    )
    end = 0
    for base, stride in strips:
        if base != end:
            raise UnsupportedError(
                f"the KV cache layout leaves or shares bytes at {end} (next strip at {base}); "
                "choose a block-outermost layout such as BLNHC"
            )
        end = base + stride * blocks
    if end != buffer_bytes:
        raise UnsupportedError(
            f"the KV cache layout covers {end} of {buffer_bytes} bytes of its buffer; "
            "choose a block-outermost layout such as BLNHC"
        )
    return RankBuffer(
        device=device, granule_bytes=granule_bytes, strides=tuple(stride for _, stride in strips)
    )


def plan_extents(
    ranks: Sequence[RankBuffer],
    settings: Settings,
    *,
    blocks_max: int,
    request_blocks: int,
    prefix_blocks: int,
) -> ExtentPlan:
    """Choose the geometry of a group whose ranks have these buffers.

    `blocks_max`: what vLLM planned for the virtual size; the plan's count is at most that.
    `request_blocks`: blocks of one request of max_model_len over all cache groups.
    `prefix_blocks`: ids, from 0, that warm-up may touch.
    Raises ConfigError for a floor, cap or extent that does not fit, UnsupportedError when
    the granule leaves no usable extent size.
    """
    unit = math.lcm(*(rank.unit_blocks for rank in ranks))
    extent_blocks = _choose_extent_blocks(ranks, settings, unit, blocks_max, request_blocks + 1)
    extents = blocks_max // extent_blocks
    layouts = tuple(rank.layout(extents, extent_blocks) for rank in ranks)
    extent_bytes: dict[str, int] = {}
    for rank, layout in zip(ranks, layouts, strict=True):
        layout.check_granule(rank.granule_bytes)
        extent_bytes[rank.device] = extent_bytes.get(rank.device, 0) + layout.extent_bytes
    prefix = min(max(1, ceil_div(prefix_blocks, extent_blocks)), extents)
    cap = _cap_extents(settings, extent_bytes, extents, prefix)
    floor = _floor_extents(settings, extent_bytes, extents, request_blocks, extent_blocks)
    return ExtentPlan(
        extent_blocks=extent_blocks,
        extents=extents,
        blocks=extents * extent_blocks,
        prefix=prefix,
        floor=max(min(floor, cap), prefix),
        cap=cap,
        layouts=layouts,
        extent_bytes=extent_bytes,
    )


def _choose_extent_blocks(
    ranks: Sequence[RankBuffer],
    settings: Settings,
    unit: int,
    blocks_max: int,
    blocks_min: int,
) -> int:
    """Return E. `unit`: smallest E that keeps to granules; all others are multiples of it."""
    block_bytes = max(rank.block_bytes for rank in ranks)
    largest = _largest_fit(unit, blocks_max, blocks_min)
    if largest == 0:
        raise UnsupportedError(
            f"the smallest extent that keeps to the driver's granules is {unit} blocks "
            f"({format_bytes(unit * block_bytes)} per rank); {blocks_max} blocks hold fewer than "
            f"{EXTENTS_MIN} of them, or, rounded to whole ones, no request of max_model_len "
            f"({blocks_min} blocks with the null block): give more memory, a smaller "
            "max_model_len or a block-outermost layout"
        )
    if settings.extent is not None:
        configured = _configured_extent(settings.extent, unit * block_bytes, largest * block_bytes)
        blocks = configured // block_bytes
        if _fits(blocks, blocks_max, blocks_min):
            return blocks
        raise ConfigError(
            "extent",
            format_bytes(settings.extent),
            f"one that leaves {blocks_min} of {blocks_max} blocks when rounded to whole extents, "
            f'such as "{format_bytes(unit * block_bytes)}"',
        )
    target_bytes = min(blocks_max * block_bytes // EXTENTS_AIM, EXTENT_BYTES_MAX)
    target = min(target_bytes // block_bytes, EXTENT_BLOCKS_MAX, largest)
    for blocks in range(max(target // unit, 1) * unit, unit, -unit):
        if _fits(blocks, blocks_max, blocks_min):
            return blocks
    return unit


def _configured_extent(extent: int, unit_bytes: int, bytes_max: int) -> int:
    """Return `extent` bytes (of the largest rank) if they can be aligned and leave room."""
    if extent % unit_bytes == 0 and extent <= bytes_max:
        return extent
    below = min(max(extent // unit_bytes * unit_bytes, unit_bytes), bytes_max)
    above = min(below + unit_bytes, bytes_max)
    near = " or ".join(f'"{format_bytes(size)}" ({size})' for size in sorted({below, above}))
    raise ConfigError(
        "extent",
        format_bytes(extent),
        f"multiples of {unit_bytes} bytes up to {bytes_max}, here {near}",
    )


def _fits(extent_blocks: int, blocks_max: int, blocks_min: int) -> bool:
    extents = blocks_max // extent_blocks
    return extents >= EXTENTS_MIN and extents * extent_blocks >= blocks_min


def _largest_fit(unit: int, blocks_max: int, blocks_min: int) -> int:
    """Return the largest multiple of `unit` that leaves enough extents and blocks, or 0."""
    for blocks in range(blocks_max // EXTENTS_MIN // unit * unit, 0, -unit):
        if _fits(blocks, blocks_max, blocks_min):
            return blocks
    return 0


def _cap_extents(
    settings: Settings, extent_bytes: dict[str, int], extents: int, prefix: int
) -> int:
    if settings.cap is None:
        return extents
    cap = min(settings.cap // each for each in extent_bytes.values())
    if cap < prefix:
        least = prefix * max(extent_bytes.values())
        raise ConfigError(
            "cap",
            format_bytes(settings.cap),
            f"at least {format_bytes(least)} per device, what the start itself touches",
        )
    return min(cap, extents)


def _floor_extents(
    settings: Settings,
    extent_bytes: dict[str, int],
    extents: int,
    request_blocks: int,
    extent_blocks: int,
) -> int:
    if settings.floor is None:
        # Extent 0 also carries the null block, which no request can use.
        return ceil_div(request_blocks + 1, extent_blocks)
    floor = max(ceil_div(settings.floor, each) for each in extent_bytes.values())
    if floor > extents:
        most = extents * min(extent_bytes.values())
        raise ConfigError(
            "floor", format_bytes(settings.floor), f"at most {format_bytes(most)} per device"
        )
    return floor
