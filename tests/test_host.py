"""The host slab: exact size, alignment, one piece per layer, and memory that goes with its last view."""

import gc
import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.backend import Weight
from offload.errors import ModelLoadError
from offload.host import HostSlab, map_anonymous
from offload.plan import ALIGNMENT_BYTES


class Host:
    """As much of a device as a slab asks for; notes what is allocated and released."""

    def __init__(self, meta: bool = False) -> None:
        self.meta = meta
        self.allocated: list[int] = []
        self.released = 0

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        if self.meta:
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
        return map_anonymous(nbytes, on_release=self._release)

    def _release(self) -> None:
        self.released += 1


def weights(*shapes: tuple[int, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> list[Weight]:
    return [Weight(f"layers.{layer}.w{n}", layer, shape, dtype, n) for n, (layer, shape) in enumerate(shapes)]


def anonymous_bytes() -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))


WEIGHTS = weights((0, (3, 50)), (0, (50,)), (0, (7, 7)), (0, (33,)), (2, (5, 64)), (2, (1,)))


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, (1 << 21) + 3])
def test_a_mapping_has_the_size_that_was_asked_and_starts_on_a_page(nbytes):
    memory = map_anonymous(nbytes)
    assert memory.shape == (nbytes,) and memory.dtype == torch.uint8
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    assert not memory.any()
    memory.fill_(255)
    assert memory.untyped_storage().nbytes() == nbytes


def test_an_empty_mapping_is_an_empty_tensor():
    assert map_anonymous(0).shape == (0,)


def test_a_mapping_that_the_system_refuses_is_one_line():
    with pytest.raises(ModelLoadError, match=r"^the host gives no mapping of [\d.]+ GiB \(.+\): offload less$"):
        map_anonymous(1 << 60)


def test_memory_is_released_once_when_the_last_view_dies_and_is_still_mapped_then():
    seen = []
    memory = map_anonymous(4096, on_release=lambda: seen.append(mapped()))
    address = memory.data_ptr()

    def mapped() -> bool:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            ranges = [line.split()[0].split("-") for line in maps]
        return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)

    view = torch.nn.Parameter(memory[128:256].view(torch.float32), requires_grad=False)
    del memory
    gc.collect()
    assert seen == []
    view.data.fill_(1.0)
    del view
    assert seen == [True]


def test_pages_go_back_to_the_system():
    before = anonymous_bytes()
    memory = map_anonymous(64 << 20)
    memory.fill_(1)
    assert anonymous_bytes() - before >= 60 << 20
    del memory
    assert anonymous_bytes() - before < 4 << 20


def test_every_weight_is_aligned_and_a_layer_is_one_piece():
    host = Host()
    slab = HostSlab(WEIGHTS, host)
    assert host.allocated == [sum(layout.nbytes for layout in slab.layouts)]
    assert slab.memory.numel() == host.allocated[0]
    start = slab.memory.data_ptr()
    for layout in slab.layouts:
        region = slab.layer(layout.layer)
        assert region.data_ptr() == start and region.is_contiguous() and region.numel() == layout.nbytes
        start += layout.nbytes
        for name, offset in zip(layout.names, layout.offsets_bytes, strict=True):
            assert slab.view(name).data_ptr() == region.data_ptr() + offset == _address(slab, name)
            assert slab.view(name).data_ptr() % ALIGNMENT_BYTES == 0


def _address(slab: HostSlab, name: str) -> int:
    return slab.layer(slab.places[name].layer).data_ptr() + slab.places[name].offset_bytes


def test_vectors_of_a_layer_come_first_in_one_piece():
    slab = HostSlab(WEIGHTS, Host())
    assert slab.layouts[0].names == ("layers.0.w1", "layers.0.w3", "layers.0.w0", "layers.0.w2")
    for layer, vectors, matrices in ((0, ("w1", "w3"), ("w0", "w2")), (2, ("w5",), ("w4",))):
        piece = slab.vectors(layer)
        assert piece.data_ptr() == slab.layer(layer).data_ptr()
        end = piece.data_ptr() + piece.numel()
        assert all(_address(slab, f"layers.{layer}.{name}") < end for name in vectors)
        assert all(_address(slab, f"layers.{layer}.{name}") >= end for name in matrices)
        assert piece.numel() == ALIGNMENT_BYTES * len(vectors)


def test_a_layer_without_vectors_has_an_empty_piece():
    assert HostSlab(weights((0, (4, 4))), Host()).vectors(0).numel() == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(1, 70), min_size=1, max_size=3)), min_size=1))
def test_no_two_weights_overlap(shapes):
    chosen = weights(*((layer, tuple(shape)) for layer, shape in shapes))
    slab = HostSlab(chosen, Host())
    slab.memory.fill_(0)
    for value, weight in enumerate(chosen, 1):
        slab.view(weight.name).view(torch.int16).fill_(value)
    for value, weight in enumerate(chosen, 1):
        view = slab.view(weight.name)
        assert view.shape == weight.shape and view.dtype == weight.dtype
        assert (view.view(torch.int16) == value).all(), weight.name
    assert slab.offloaded_bytes == sum(weight.nbytes for weight in chosen)
    assert slab.locked_bytes % mmap.PAGESIZE == 0
    assert 0 <= slab.locked_bytes - slab.memory.numel() < mmap.PAGESIZE


def test_a_shared_weight_has_one_place_under_each_name():
    shared = Weight("layers.1.tied", 1, (3, 50), torch.bfloat16, storage=0)
    slab = HostSlab([*WEIGHTS, shared], Host())
    assert slab.view("layers.1.tied").data_ptr() == slab.view("layers.0.w0").data_ptr()
    assert slab.offloaded_bytes == sum(weight.nbytes for weight in WEIGHTS)
    assert [layout.layer for layout in slab.layouts] == [0, 2]


def test_a_weight_outside_the_layers_is_refused():
    with pytest.raises(ValueError, match="^embed.weight is outside the decoder layers: only their parameters can"):
        HostSlab([Weight("embed.weight", None, (4, 4), torch.bfloat16, 0)], Host())


@pytest.mark.parametrize("meta", [False, True], ids=["memory", "meta"])
def test_survivors_are_named_by_the_bytes_they_look_at(meta):
    other = torch.empty(1 << 16, dtype=torch.uint8, device="meta" if meta else "cpu")
    slab = HostSlab(WEIGHTS, Host(meta))
    kept = torch.nn.Parameter(slab.view("layers.0.w2")[1:3], requires_grad=False)
    assert slab.survivors == ()
    slab.close()
    slab.close()
    assert slab.survivors == ("layers.0.w2",)
    del kept
    assert slab.survivors == () and other.numel()


def test_a_view_of_everything_keeps_every_name():
    slab = HostSlab(WEIGHTS, Host())
    kept = slab.memory
    slab.close()
    assert kept.numel() and slab.survivors == tuple(weight.name for weight in WEIGHTS)


def test_memory_held_where_python_does_not_see_it_keeps_every_name():
    slab = HostSlab(WEIGHTS, Host())
    storage = slab.memory.untyped_storage()
    slab.close()
    assert storage.nbytes() and slab.survivors == tuple(weight.name for weight in WEIGHTS)


def test_closing_releases_the_memory_and_forbids_new_views():
    host = Host()
    slab = HostSlab(WEIGHTS, host)
    slab.close()
    assert host.released == 1
    with pytest.raises(ValueError, match=r"^the host slab is closed: ask for views before close\(\)$"):
        slab.view("layers.0.w0")
