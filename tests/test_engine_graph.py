"""The decode step as a graph: the same tokens, captured once per batch, and the backend told at the right moments."""

import warnings

import pytest

import offload
from tests.engines import CONFIGS, CountingDevice
from tests.tiny_folder import write_model

PROMPTS = [[5, 3, 96, 1, 44], [11, 12], [90]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


class RecordingDevice(CountingDevice):
    """A CPU on which a capture issues nothing, as on a GPU, and everything about graphs is written down."""

    def __init__(self):
        super().__init__()
        self.events = []

    def mark_step(self, name):
        self.events.append(name)

    def from_host(self, values, dtype=None):
        assert not self.capturing, "a graph cannot take values from the host"
        return super().from_host(values, dtype)

    def to_host(self, tensor):
        assert not self.capturing, "a graph cannot give values to the host"
        return super().to_host(tensor)

    def capture(self, body):
        self.events.append("capture")
        graph = super().capture(body)
        replay = graph.replay

        def watched():
            self.events.append("replay")
            replay()

        graph.replay = watched
        return graph


def watch(backend, events):
    for name in ("before_capture", "before_capture_ends", "after_capture"):
        original = getattr(backend, name)

        def watched(original=original, name=name):
            events.append(name)
            original()

        setattr(backend, name, watched)


def tokens_of(engine, prompts=PROMPTS, count=7):
    return [generation.token_ids for generation in engine.generate(prompts, count, stop_at_eos=False)]


@pytest.fixture(scope="module")
def eager(folder):
    with offload.load(folder, device="cpu") as engine:
        return tokens_of(engine)


@pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")
@pytest.mark.parametrize("name", [None, "uva-half", "prefetch-odd-ring", "prefetch-all-step-1", "prefetch-all-step-4"])
def test_a_replayed_step_gives_the_same_tokens(name, folder, eager):
    with offload.load(folder, CONFIGS.get(name), "cpu", graph=True, max_context=40) as engine:
        for _ in range(3):
            assert tokens_of(engine) == eager
        assert tokens_of(engine, PROMPTS[1:2]) == eager[1:2]
        assert tokens_of(engine, PROMPTS, 1) == [tokens[:1] for tokens in eager]


def test_one_capture_per_batch_and_the_backend_is_told(folder, eager):
    device = RecordingDevice()
    with offload.load(folder, device=device, graph=True) as engine:
        watch(engine.parts.backend, device.events)
        device.events.clear()
        assert tokens_of(engine) == eager
    captured = ["before_capture", "capture", "before_capture_ends", "after_capture", "before_capture", "replay"]
    # On a CPU a replay is the body again, so the backend hears the end of the body each time.
    replayed = ["replay", "before_capture_ends", "tg"]
    assert device.events == ["pp", "tg", *captured, "before_capture_ends", "tg", *replayed * 4]


def test_a_failed_capture_is_over_and_the_next_batch_works(folder, eager):
    device = RecordingDevice()
    with offload.load(folder, device=device, graph=True) as engine:
        watch(engine.parts.backend, device.events)
        capture = device.capture

        def fail(body):
            capture(body)
            raise RuntimeError("no memory for the graph")

        device.capture = fail
        with pytest.raises(RuntimeError, match="no memory for the graph"):
            tokens_of(engine)
        assert device.events[-1] == "after_capture"
        device.capture = capture
        assert tokens_of(engine) == eager


def test_one_crossing_per_replayed_step(folder):
    device = RecordingDevice()
    with offload.load(folder, device=device, graph=True) as engine:
        device.reads = 0
        tokens_of(engine)
        assert device.reads == 7


@pytest.mark.parametrize("profile", ["h200-pcie5"])
@pytest.mark.parametrize("name", [None, "uva-half", "prefetch-odd-ring"])
def test_a_virtual_gpu_finds_no_race_in_capture_and_replay(name, profile, folder, eager):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", offload.OffloadConfigWarning)
        for graph in (False, True):
            with offload.load(folder, CONFIGS.get(name), f"virtual:{profile}", graph=graph) as engine:
                for _ in range(2):
                    assert tokens_of(engine) == eager
