"""Programs of kernels and copies that have demands but no tensors."""

from offload.virtual.clocks import VirtualEvent
from offload.virtual.issue import Issuer, Operation
from offload.virtual.races import RaceDetector
from offload.virtual.steps import report_step


class Program:
    """Issues kernels and copies by their demands alone, one picosecond of host time each."""

    def __init__(self, profile):
        self.issuer = Issuer(profile, RaceDetector(str))
        self.profile = profile
        self.copy_stream = self.issuer.add_stream("copy")

    def kernel(self, layer=None, stream=None, **demands):
        return self._issue("kernel", self.profile.kernel_ps, stream or self.issuer.compute, layer, demands)

    def copy(self, layer=None, **demands):
        return self._issue("copy", self.profile.copy_ps, self.copy_stream, layer, demands)

    def _issue(self, kind, launch_ps, stream, layer, demands):
        self.issuer.spend(self.profile.issue_ps)
        return self.issuer.enqueue(Operation(kind, kind, layer, launch_ps, demands, [], []), stream)

    def order(self, before, after, reason="stall"):
        event = VirtualEvent()
        self.issuer.record(event, before)
        self.issuer.wait(event, after, None, reason)

    def wait_for(self, entry):
        issuer = self.issuer
        issuer.let_host_wait(lambda: issuer.simulator.run_until(entry), [issuer.compute])

    def report(self, begin_ps, end_ps):
        issuer = self.issuer
        issuer.simulator.run_to(end_ps)
        return report_step(issuer.simulator, issuer.host_waits, self.profile, issuer.compute, "tg", begin_ps, end_ps)

    def run(self):
        self.issuer.let_host_wait(self.issuer.simulator.drain, self.issuer.streams)
        return self.issuer.simulator
