"""A GPU that is not there: the device contract with simulated time, memory and races.

What it models. Every operator is seen with the bytes that it moves, by where they live, and its FLOPs, and takes what
the slowest of bus, device memory and FLOPs takes at the rates of a hardware profile, after its launch. Streams, events
and captured graphs order operators as CUDA's do. Copies and kernels that read host memory share one bus: each way has
its own rate, both together get the faster of the two. The host takes its time to issue each operator, and waits when it
reads a token. Memory is counted by the lifetime of storages. Races are found from the order of operators alone.

What it does not. Caches, the shapes at which kernels fall short of their rates, a bus that is slower for large
footprints, rounding by allocators, other users of the machine, and the bus in the other direction. A time is a model's
answer, good for choosing what to measure; it says *simulated* wherever it is shown.
"""

from offload.virtual.capture import CaptureError
from offload.virtual.device import VirtualDevice
from offload.virtual.memory import VirtualOutOfMemoryError
from offload.virtual.profiles import Profile, load_profile, shipped_profiles
from offload.virtual.races import RaceError
from offload.virtual.stamps import StampError
from offload.virtual.steps import StepReport

__all__ = [
    "CaptureError",
    "Profile",
    "RaceError",
    "StampError",
    "StepReport",
    "VirtualDevice",
    "VirtualOutOfMemoryError",
    "load_profile",
    "shipped_profiles",
]
