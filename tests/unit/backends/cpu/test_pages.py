"""KV blocks lie where their memory is, or will be before they are used."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from paceline.backends.cpu.pages import AHEAD, KvPages
from paceline.backends.cpu.sizes import NEIGHBOURS

LAYERS, HEADS, BLOCKS = 3, 2, 4096
GROUP = 64 << 10
LAYER = GROUP * BLOCKS // NEIGHBOURS
LARGE = 2 << 20
"""Bytes of a large page."""


@pytest.fixture
def kv() -> npt.NDArray[np.uint8]:
    """Fresh memory of the system's: what the allocator has kept from tests before would be present already."""
    fresh = mmap.mmap(-1, LAYERS * LAYER)
    if sys.platform == "linux":
        fresh.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(fresh, np.uint8)


@pytest.fixture
def pages(kv: npt.NDArray[np.uint8]) -> Iterator[KvPages]:
    found = KvPages(kv, LAYER, GROUP, BLOCKS, HEADS)
    yield found
    found.close()


def is_present(kv: npt.NDArray[np.uint8], start: int, stop: int) -> npt.NDArray[np.bool_]:
    """Of each page within those bytes."""
    first, last = -(-(kv.ctypes.data + start) // mmap.PAGESIZE), (kv.ctypes.data + stop) // mmap.PAGESIZE
    found = np.zeros(last - first, np.uint8)
    assert not ctypes.CDLL(None).mincore(
        ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE), ctypes.c_void_p(found.ctypes.data)
    )
    return found % 2 == 1


def test_blocks_lie_in_the_order_in_which_they_are_used_whatever_their_ids(pages: KvPages) -> None:
    first = pages.places_of(np.array([[900, 901, -1], [7, 8, 9]], np.int32))
    assert sorted([*first[0, :2].tolist(), *first[1].tolist()]) == list(range(5))
    more = pages.places_of(np.array([[7, *range(100, 112)]], np.int32))
    assert more[0, 0] == first[1, 0], "a block stays where it is"
    # The group is full: the next one begins behind all heads of it.
    assert more[0, 1:].tolist() == [*range(5, NEIGHBOURS), HEADS * NEIGHBOURS]


def test_every_block_has_a_place_of_its_own(pages: KvPages) -> None:
    ids = np.random.default_rng(0).permutation(BLOCKS).astype(np.int32)
    places = np.concatenate([pages.places_of(part.reshape(1, -1))[0] for part in np.split(ids, 8)])
    assert len(set(places.tolist())) == BLOCKS
    assert places.max() + NEIGHBOURS * (HEADS - 1) < BLOCKS * HEADS


@pytest.mark.skipif(sys.platform != "linux", reason="no other system makes pages present on request")
def test_memory_is_present_before_blocks_are_used_and_not_long_before(kv: npt.NDArray[np.uint8], pages: KvPages) -> None:
    for used in (0, 10, 300):
        if used:
            pages.places_of(np.arange(BLOCKS - used, BLOCKS, dtype=np.int32).reshape(1, -1))
        pages.brought.result()
        reach = (-(-used // NEIGHBOURS) + AHEAD) * GROUP
        for layer in range(0, LAYERS * LAYER, LAYER):
            assert is_present(kv, layer, layer + reach).all()
            # A large page may reach further.
            assert not is_present(kv, layer + reach + LARGE, layer + LAYER - LARGE).any()
    assert not kv.any(), "nothing is written"
