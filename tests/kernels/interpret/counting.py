"""An instrument around the Triton interpreter's loads: how often each element was read, and by which program.

The promise of these kernels is that every weight byte crosses the bus once. A sum of bytes could hide an element that
is read twice beside one that is never read, so the instrument keeps a counter and an owner for every single element.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from triton.runtime.interpreter import interpreter_builder

NOBODY = -1


@dataclass
class Watched:
    """The counters of one tensor's storage: one entry an element, rows' padding and guard elements included."""

    tensor: torch.Tensor
    loads: np.ndarray = field(init=False)
    first_owner: np.ndarray = field(init=False)
    last_owner: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        storage = self.tensor.untyped_storage()
        self.base = storage.data_ptr()
        self.itemsize = self.tensor.element_size()
        elements = storage.nbytes() // self.itemsize
        self.end = self.base + elements * self.itemsize
        self.loads = np.zeros(elements, dtype=np.int64)
        self.first_owner = np.full(elements, NOBODY, dtype=np.int64)
        self.last_owner = np.full(elements, NOBODY, dtype=np.int64)

    def elements_at(self, addresses: np.ndarray) -> np.ndarray:
        """The indices, within this storage, of those addresses that fall into it."""
        if addresses.size == 0 or addresses.max() < self.base or addresses.min() >= self.end:
            return addresses[:0]
        inside = addresses[(addresses >= self.base) & (addresses < self.end)] - np.uint64(self.base)
        assert not (inside % self.itemsize).any(), "a load that straddles two elements"
        return inside // np.uint64(self.itemsize)

    def record_load(self, addresses: np.ndarray, owner: int) -> None:
        index = self.elements_at(addresses)
        np.add.at(self.loads, index, 1)
        fresh = index[self.first_owner[index] == NOBODY]
        self.first_owner[fresh] = owner
        self.last_owner[index] = owner

    def of_view(self, counters: np.ndarray) -> np.ndarray:
        """The counters of the tensor's own elements, in the tensor's shape."""
        strides = [stride * counters.itemsize for stride in self.tensor.stride()]
        return np.lib.stride_tricks.as_strided(counters[self.tensor.storage_offset() :], self.tensor.shape, strides)

    def of_padding(self, counters: np.ndarray) -> np.ndarray:
        """The counters of the elements that lie in the storage but not in the tensor."""
        outside = np.ones(counters.shape, dtype=bool)
        self.of_view(outside)[...] = False
        return counters[outside]

    def assert_each_element_loaded_once_by_one_program(self, never: np.ndarray | None = None) -> None:
        """R = 1: nothing missed, nothing read twice, nothing read by two programs, no padding read.

        Args:
            never: which entries of the first dimension must not be read at all; by default there are none.
        """
        loads = self.of_view(self.loads)
        if never is not None:
            assert not loads[never].any(), "a part that nobody needs was read"
            loads = loads[~never]
        assert (loads == 1).all(), f"loads per element: {np.unique(loads, return_counts=True)}"
        assert (self.first_owner == self.last_owner).all(), "an element was read by two programs"
        assert not self.of_padding(self.loads).any(), "padding was read"


class LoadCounter:
    """Counts, while entered, what interpreted kernels load from the watched tensors.

    A program is named by its launch and its index in the grid, so that two launches do not look like one owner.
    """

    def __init__(self) -> None:
        self.watched: list[Watched] = []
        self.launches = 0

    def watch(self, tensor: torch.Tensor) -> Watched:
        """Count loads from the storage of `tensor` from now on."""
        watched = Watched(tensor)
        self.watched.append(watched)
        return watched

    def owner(self) -> int:
        x, y, z = interpreter_builder.grid_idx
        size_x, size_y, _ = interpreter_builder.grid_dim
        return (self.launches << 40) | (x + size_x * (y + size_y * z))

    def __enter__(self) -> LoadCounter:
        builder = interpreter_builder
        load, set_grid_dim = builder.create_masked_load, builder.set_grid_dim

        def counted_load(ptrs, mask, *args):
            addresses = _active_addresses(ptrs, mask)
            for watched in self.watched:
                watched.record_load(addresses, self.owner())
            return load(ptrs, mask, *args)

        def counted_launch(*grid):
            self.launches += 1
            set_grid_dim(*grid)

        # Instance attributes: the class stays untouched, and __exit__ only has to delete them again.
        builder.create_masked_load = counted_load
        builder.set_grid_dim = counted_launch
        return self

    def __exit__(self, *exc_info: object) -> None:
        for name in ("create_masked_load", "set_grid_dim"):
            delattr(interpreter_builder, name)


def _active_addresses(ptrs, mask) -> np.ndarray:
    addresses = np.asarray(ptrs.data)
    return addresses[np.broadcast_to(mask.data, addresses.shape)]


def guarded(tensor: torch.Tensor, row_padding: int = 3, guard_rows: int = 2) -> torch.Tensor:
    """A copy of a matrix (or stack of matrices) whose rows are padded and fenced with NaN.

    Args:
        tensor: (..., N, K).
        row_padding: elements between two rows; choose it so that rows keep the alignment under test.
        guard_rows: whole rows of NaN behind each matrix.

    Returns:
        A view of the same shape and values, with row stride K + row_padding, in a storage that is NaN elsewhere.
    """
    *batch, rows, columns = tensor.shape
    storage = torch.full((*batch, rows + guard_rows, columns + row_padding), float("nan"), dtype=tensor.dtype)
    view = storage[..., :rows, :columns]
    view.copy_(tensor)
    return view
