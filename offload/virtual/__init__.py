"""A GPU that is not there: the device contract with simulated time, memory and races."""

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
