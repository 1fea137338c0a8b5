"""The virtual GPU: the device contract without a GPU.

Operators run at once on CPU tensors (or not at all, on `meta`); what a GPU would have done with them is recorded.
Each operator is charged by a roofline over a hardware profile, checked for races by vector clocks, and queued on its
stream; a small event simulation gives the times when the host waits. Small values that the host sends or reads cost
their latency but no bus bytes, so that the bus carries weights alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from offload.device import Device, FreeMemory, Residency
from offload.virtual.capture import Capture, CapturedOperator, CapturedStamp, CaptureError, VirtualGraph
from offload.virtual.clocks import Entry, VirtualEvent, VirtualStream
from offload.virtual.cpu import CpuNumerics
from offload.virtual.issue import Issuer, Operation
from offload.virtual.memory import MemoryAccount
from offload.virtual.meta import MetaNumerics
from offload.virtual.observe import Observer
from offload.virtual.operators import byte_range
from offload.virtual.profiles import Profile, load_profile
from offload.virtual.races import RaceDetector, Range
from offload.virtual.stamps import Stamps
from offload.virtual.steps import StepReport, report_step
from offload.virtual.trace import chrome_trace
from offload.virtual.work import Work, demands_of


class VirtualDevice(Device):
    """A GPU that is simulated from a profile.

    Args:
        profile: the hardware, or the name of a shipped profile, or the path of a profile's JSON file.
        torch_device: "cpu" for real numbers, "meta" for models of any size.

    Raises:
        ModelLoadError: there is no such profile.
    """

    simulated = True

    def __init__(self, profile: Profile | str, torch_device: str = "cpu") -> None:
        if torch_device not in ("cpu", "meta"):
            raise ValueError(f"a virtual GPU computes on 'cpu' or 'meta', got {torch_device!r}")
        self.profile = load_profile(profile) if isinstance(profile, str) else profile
        self.name = f"virtual:{self.profile.name}"
        self.torch_device = torch.device(torch_device)
        self.numerics = MetaNumerics() if torch_device == "meta" else CpuNumerics()
        self.account = MemoryAccount(self.profile.memory_bytes, self.profile.host_memory_bytes, self._forget)
        self.stamps = Stamps()
        self.races = RaceDetector(self._describe)
        self.issuer = Issuer(self.profile, self.races)
        self.current_capture: Capture | None = None
        self._marks: list[tuple[str, int, int]] = []
        self._layer: int | None = None
        self._last_copy: Entry | CapturedOperator | None = None
        self._thread = threading.local()

    # -- memory -----------------------------------------------------------------------------------------------------

    def allocate_host(self, nbytes: int) -> Tensor:
        return self._allocate(nbytes, "host", "offloaded weights")

    def allocate_device(self, nbytes: int) -> Tensor:
        memory = self._allocate(nbytes, "device", "weights and cache")
        with self.quiet():
            # Not a number in any float: what is used before it was written shows in the tokens.
            return memory.fill_(0xFF)

    def _allocate(self, nbytes: int, residency: Residency, purpose: str) -> Tensor:
        self.account.check(nbytes, residency, purpose)
        with self.quiet():
            tensor = self.numerics.allocate(nbytes)
        self.account.hold(tensor, residency, purpose)
        return tensor

    def device_view(self, host: Tensor) -> Tensor:
        if self.residency(host) != "host":
            raise ValueError(f"device_view takes a view of allocate_host memory, got memory of {self.name}")
        with self.quiet():
            return host.view(host.shape)

    def residency(self, tensor: Tensor) -> Residency:
        return self.account.residency(self.account.storage_of(tensor))

    def device_memory(self) -> FreeMemory:
        return self.account.free("device")

    def host_memory(self) -> FreeMemory:
        return self.account.free("host")

    # -- data that crosses to Python --------------------------------------------------------------------------------

    def from_host(self, values: list[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        self.refuse_in_capture("from_host")
        with self.quiet():
            tensor = torch.tensor(values, dtype=dtype, device="cpu").to(self.torch_device)
        self.issuer.spend(self.profile.issue_ps)
        self._enqueue_latency("copy", "from_host", [], [self._range(tensor, "activations")])
        return tensor

    def to_host(self, tensor: Tensor) -> list[Any]:
        self.let_host_read([tensor], "to_host")
        with self.quiet():
            values = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu") if tensor.is_meta else tensor
            return values.tolist()

    def let_host_read(self, tensors: Sequence[Tensor], name: str) -> None:
        """The host waits until these have their values, and the way of small values to it has passed."""
        self.refuse_in_capture(name)
        self.issuer.spend(self.profile.issue_ps)
        entry = self._enqueue_latency("read", name, [self._range(tensor) for tensor in tensors], [])
        self.issuer.let_host_wait(lambda: self.issuer.simulator.run_until(entry), [self.issuer.compute])

    def _enqueue_latency(self, kind: str, name: str, reads: list[Range], writes: list[Range]) -> Any:
        operation = Operation(kind, name, self._layer, self.profile.copy_ps, {}, reads, writes)
        return self.issuer.enqueue(operation, self.issuer.compute)

    # -- streams ----------------------------------------------------------------------------------------------------

    def new_stream(self) -> VirtualStream:
        number = sum(not stream.name.endswith("(graph)") for stream in self.issuer.streams)
        return self.issuer.add_stream("copy" if number == 1 else f"copy {number}")

    def new_event(self) -> VirtualEvent:
        return VirtualEvent()

    def record(self, event: VirtualEvent, stream: VirtualStream | None = None) -> None:
        stream = stream or self.issuer.compute
        if self.current_capture is not None:
            self.current_capture.record(event, stream)
        else:
            self.issuer.record(event, stream)

    def wait(self, event: VirtualEvent, stream: VirtualStream | None = None) -> None:
        stream = stream or self.issuer.compute
        reason = "stall" if stream is self.issuer.compute else "slot not free"
        if self.current_capture is not None:
            self.current_capture.wait(event, stream, self._layer, reason)
        elif event.capture is not None:
            raise CaptureError(f"{stream} waits for an event recorded inside a captured graph: record it afresh first")
        elif event.recorded:
            self.issuer.wait(event, stream, self._layer, reason)

    def copy(self, destination: Tensor, source: Tensor, stream: VirtualStream | None = None) -> None:
        if destination.shape != source.shape or destination.dtype != source.dtype:
            given = f"{tuple(source.shape)} {source.dtype} and {tuple(destination.shape)} {destination.dtype}"
            raise ValueError(f"copy needs tensors of one shape and dtype, got {given}")
        nbytes = destination.numel() * destination.itemsize
        # Memory that this device did not give is pageable host memory, such as a mapped file: of no stream's concern.
        known = self.account.knows(source)
        sides = {self.residency(destination), self.residency(source) if known else "host"}
        demands = {"ce": nbytes, "hbm": nbytes} if "host" in sides else {"hbm": 2 * nbytes}
        self.issuer.spend(self.profile.issue_ps)
        rerun = None
        with self.quiet(), torch.inference_mode():
            if self.current_capture is not None:
                self.current_capture.preserve([destination])
                rerun = (torch.ops.aten.copy_.default, (destination, source), {}, [])
            if not destination.is_meta:
                destination.copy_(source)
        reads = [self._range(source)] if known else []
        operation = Operation(
            "copy", "copy", self._layer, self.profile.copy_ps, demands, reads, [self._range(destination)]
        )
        self._last_copy = self._issue(operation, stream or self.issuer.compute, rerun)

    def synchronise(self) -> None:
        self.refuse_in_capture("synchronise")
        self.issuer.let_host_wait(self.issuer.simulator.drain, self.issuer.streams)

    # -- capture ----------------------------------------------------------------------------------------------------

    @property
    def capturing(self) -> bool:  # type: ignore[override]
        return self.current_capture is not None

    def capture(self, body: Callable[[], None]) -> VirtualGraph:
        self.refuse_in_capture("capture")
        capture = self.current_capture = Capture(self.issuer.compute)
        stamps = self.stamps.snapshot()
        try:
            body()
            capture.finish()
        finally:
            self.current_capture = None
            self.stamps.restore(stamps)
            with self.quiet():
                capture.undo()
        return VirtualGraph(self, capture.nodes)

    def refuse_in_capture(
        self, what: str, why: str = "a graph cannot exchange data with the host or wait for it"
    ) -> None:
        if self.current_capture is not None:
            raise CaptureError(f"{what} inside a capture: {why}")

    # -- observing --------------------------------------------------------------------------------------------------

    @contextmanager
    def active(self, foreign: bool = False) -> Iterator[None]:  # type: ignore[override]
        if getattr(self._thread, "observed", False):
            yield
            return
        self._thread.observed = True
        try:
            with torch.inference_mode(), Observer(self, may_read=foreign and self.torch_device.type != "meta"):
                yield
        finally:
            self._thread.observed = False

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Let torch work for the device itself: what runs in here is charged to nobody."""
        before = self.is_quiet
        self._thread.quiet = True
        try:
            yield
        finally:
            self._thread.quiet = before

    @property
    def is_quiet(self) -> bool:
        return getattr(self._thread, "quiet", False)

    def enter_layer(self, layer: int | None) -> None:
        self._layer = layer

    def stamp(self, buffer: Tensor, layer: int) -> None:
        where = self._range(buffer)
        self.account.rename(where[0], "slots")
        if self._last_copy is not None:
            self._last_copy.bring(layer)
        if self.current_capture is not None:
            self.current_capture.nodes.append(CapturedStamp(where, layer, check=False))
        elif not self.stamps.name(where):
            # A slot holds what is copied into it: a layer whose copy was too short reads what nothing has written.
            self.races.blank_rest(where)
        self.stamps.put(where, layer)

    def check_stamp(self, buffer: Tensor, layer: int) -> None:
        where = self._range(buffer)
        if self.current_capture is not None:
            self.current_capture.nodes.append(CapturedStamp(where, layer, check=True))
        self.stamps.check(where, layer)

    def issue_kernel(self, name: str, work: Work, rerun: tuple[Any, ...] | None) -> None:
        """Issue one operator on the compute stream (called by the observer).

        Args:
            rerun: how a captured graph runs it again.
        """
        demands, reads, writes = demands_of(work, self.account, self.profile)
        self.issuer.spend(self.profile.issue_ps)
        operation = Operation("kernel", name, self._layer, self.profile.kernel_ps, demands, reads, writes)
        self._issue(operation, self.issuer.compute, rerun)

    def _issue(
        self, operation: Operation, stream: VirtualStream, rerun: tuple[Any, ...] | None
    ) -> Entry | CapturedOperator:
        if self.current_capture is None:
            return self.issuer.enqueue(operation, stream)
        node = CapturedOperator(operation, stream, rerun)
        self.current_capture.operator(node)
        return node

    def _range(self, tensor: Tensor, purpose: str = "operators") -> Range:
        return self.account.storage_of(tensor, purpose), *byte_range(tensor)

    def _forget(self, storage: int) -> None:
        self.races.forget(storage)
        self.stamps.forget(storage)

    def _describe(self, where: Range) -> str:
        return f"bytes {where[1]}..{where[2]} of {self.stamps.name(where) or self.account.purpose(where[0])}"

    # -- results ----------------------------------------------------------------------------------------------------

    def mark_step(self, name: str) -> None:
        self.refuse_in_capture("mark_step")
        self.issuer.simulator.run_to(self.issuer.host_ps)
        self._marks.append((name, self._marks[-1][2] if self._marks else 0, self.issuer.host_ps))

    def step_report(self, index: int = -1) -> StepReport:
        """Time, bound, idle time by cause, stalls by layer and bus bytes of a marked step (the last one).

        Raises:
            ValueError: no step was marked.
        """
        if not self._marks:
            raise ValueError("no step was marked: call mark_step at the end of each")
        issuer = self.issuer
        return report_step(issuer.simulator, issuer.host_waits, self.profile, issuer.compute, *self._marks[index])

    def step_reports(self) -> list[StepReport]:
        """`step_report` of every marked step."""
        return [self.step_report(index) for index in range(len(self._marks))]

    def timeline(self) -> dict[str, Any]:
        """Everything until now as a Chrome trace (JSON object); waits for the device first."""
        self.synchronise()
        return chrome_trace(self.name, self.issuer.simulator, self.issuer.streams, self.step_reports())
