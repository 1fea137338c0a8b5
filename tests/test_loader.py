"""From a folder to the destinations: every weight in its place once, and nothing left when it fails."""

import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from offload.dummy import DummyWeights, NoWeights
from offload.errors import ModelLoadError
from offload.loader import load_weights, open_source
from tests.small_checkpoint import (
    SmallModel,
    assert_loaded,
    checkpoint_tensors,
    poisoned,
    split,
    write_folder,
)

ROOT = Path(__file__).resolve().parent.parent


class HostOnly:
    """No loader on a CPU needs more of a device than an identity."""


def load(folder, model: SmallModel, destinations=None, load_format="safetensors") -> dict[str, torch.Tensor]:
    source = open_source(folder, load_format)
    source.check(model)
    destinations = destinations or poisoned(model)
    load_weights(source, model, destinations.__getitem__, HostOnly())
    return destinations


def threads() -> set[str]:
    return {each.name for each in threading.enumerate() if each is not threading.main_thread()}


@pytest.mark.parametrize("index", [False, True], ids=["no-index", "index"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_checkpoint_tensor_reaches_its_slice(tmp_path, shards, index):
    tensors = checkpoint_tensors()
    assert_loaded(load(write_folder(tmp_path, *split(tensors, shards), index=index), SmallModel()), tensors)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_models_dtype_is_what_arrives(tmp_path, source, target):
    tensors = checkpoint_tensors(source)
    assert_loaded(load(write_folder(tmp_path, tensors), SmallModel(target)), tensors)


def test_tied_and_computed_tensors_do_not_overwrite_anything(tmp_path):
    tensors = checkpoint_tensors()
    extra = {"lm_head.weight": torch.full((11, 6), 7.0), "layers.0.rotary_emb.inv_freq": torch.ones(4)}
    assert_loaded(load(write_folder(tmp_path, tensors | extra), SmallModel()), tensors)


def test_a_second_load_and_a_load_after_a_failure_work(tmp_path):
    tensors = checkpoint_tensors()
    write_folder(tmp_path, tensors)
    model = SmallModel()
    load(tmp_path, model)
    with pytest.raises(ZeroDivisionError):
        load_weights(open_source(tmp_path), model, lambda name: 1 / 0, HostOnly())
    assert_loaded(load(tmp_path, model), tensors)


class Silent(SmallModel):
    """Says that it can be offloaded and asks for nothing."""

    supports_weight_offload = True

    def load_weights(self, checkpoint, destination):
        """Do nothing."""


class Forgetful(SmallModel):
    """Leaves the last tensor out."""

    def load_weights(self, checkpoint, destination):
        class AllButOne:
            def read_into(self, name, target):
                if name != "layers.2.norm.weight":
                    checkpoint.read_into(name, target)

        super().load_weights(AllButOne(), destination)


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_a_loader_that_asks_for_nothing_is_a_defect_of_the_model(tmp_path, load_format):
    write_folder(tmp_path, checkpoint_tensors())
    with pytest.raises(ModelLoadError) as caught:
        load(tmp_path, Silent(), load_format=load_format)
    assert str(caught.value) == (
        "no destination was asked for any weight: a defect of Silent.load_weights, not of the checkpoint"
    )


def test_a_loader_that_forgets_a_tensor_is_a_defect_of_the_model(tmp_path):
    with pytest.raises(ModelLoadError) as caught:
        load(write_folder(tmp_path, checkpoint_tensors()), Forgetful())
    assert str(caught.value) == (
        '1 tensors were not read, first "layers.2.norm.weight": '
        "a defect of Forgetful.load_weights, not of the checkpoint"
    )


def test_an_unknown_format(tmp_path):
    with pytest.raises(ValueError, match=r'^no load format "gguf": choose one of safetensors, dummy, meta$'):
        open_source(tmp_path, "gguf")


def test_dummy_and_meta_need_no_files(tmp_path):
    assert isinstance(open_source(tmp_path / "nowhere", "dummy"), DummyWeights)
    assert isinstance(open_source(tmp_path / "nowhere", "meta"), NoWeights)


def test_meta_fills_nothing():
    model = SmallModel()
    destinations = {name: each.data for name, each in model.named_parameters(remove_duplicate=False)}
    load_weights(NoWeights(), model, destinations.__getitem__, HostOnly())


@pytest.mark.parametrize("when", [1, 4])
def test_an_interrupt_leaves_no_thread_and_no_file(tmp_path, when):
    write_folder(tmp_path, checkpoint_tensors())
    model = SmallModel()
    source = open_source(tmp_path)
    destinations = poisoned(model)
    asked = []

    def interrupting(name: str) -> torch.Tensor:
        asked.append(name)
        if len(asked) == when:
            raise KeyboardInterrupt
        return destinations[name]

    before = threads(), len(os.listdir("/proc/self/fd"))
    with pytest.raises(KeyboardInterrupt):
        load_weights(source, model, interrupting, HostOnly())
    assert (threads(), len(os.listdir("/proc/self/fd"))) == before


class Terminal(io.StringIO):
    """A stderr that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_and_no_thread_of_its_own(tmp_path, monkeypatch):
    before = threads()
    monkeypatch.setattr(sys, "stderr", Terminal())
    load(write_folder(tmp_path, checkpoint_tensors()), SmallModel())
    assert "loading weights:" in sys.stderr.getvalue() and "/1.06k" in sys.stderr.getvalue()
    assert threads() == before


def test_no_bar_and_no_thread_where_stderr_is_no_terminal(tmp_path, capfd):
    before = threads()
    load(write_folder(tmp_path, checkpoint_tensors()), SmallModel())
    assert capfd.readouterr() == ("", "")
    assert threads() == before


def test_no_bar_in_a_process_without_stderr(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    load(write_folder(tmp_path, checkpoint_tensors()), SmallModel())


MEMORY = """
import sys
from pathlib import Path
import torch
from torch import nn
from offload.host import HostSlab, map_anonymous
from offload.backend import Weight
from offload.loader import load_weights, open_source
from offload.models.base import Architecture, Slice
import safetensors, tqdm

class Host:
    def allocate_host(self, nbytes):
        return map_anonymous(nbytes)

class Wide(Architecture):
    def __init__(self, dtype):
        super().__init__()
        with torch.device("meta"):
            self.parts = nn.ParameterList(nn.Parameter(torch.empty(ROWS, 4096, dtype=dtype), False) for _ in range(2))
    def checkpoint_slices(self):
        half = ROWS // 2
        place = lambda part, side: Slice(f"parts.{part}", (half, 4096), half * side, half)
        return {f"{part}.{side}": place(part, side) for part in range(2) for side in range(2)}

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

folder, ROWS = Path(sys.argv[1]), int(sys.argv[2])
dtype = getattr(torch, sys.argv[3])
torch.ones(4).to(torch.bfloat16)
before = anonymous()
peak = before
model = Wide(dtype)
source = open_source(folder)
source.check(model)
weights = [Weight(f"parts.{part}", part, (ROWS, 4096), dtype, part) for part in range(2)]
slab = HostSlab(weights, Host())
import threading, time
done = threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        done.wait(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
load_weights(source, model, slab.view, Host())
done.set(); watcher.join()
peak = max(peak, anonymous())
planned = slab.locked_bytes
assert all((slab.view(f"parts.{part}") == part + 1).all() for part in range(2))
print(peak - before - planned, planned)
"""


@pytest.mark.parametrize("target", ["bfloat16", "float32"])
def test_anonymous_memory_grows_by_the_planned_bytes_and_little_more(tmp_path, target):
    rows = 16 * 1024
    tensors = {
        f"{part}.{side}": torch.full((rows // 2, 4096), part + 1.0, dtype=torch.bfloat16)
        for part in range(2)
        for side in range(2)
    }
    write_folder(tmp_path, *split(tensors, 2))
    del tensors
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path), str(rows), target],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    extra, planned = map(int, done.stdout.split())
    assert planned >= 256 << 20
    # A part of the slab that nobody wrote would show as a large negative number.
    assert -(1 << 20) <= extra <= 64 << 20


INTERRUPT = """
import signal, sys, threading
from pathlib import Path
from offload.loader import load_weights, open_source
from tests.small_checkpoint import SmallModel, poisoned
model = SmallModel()
source = open_source(Path(sys.argv[1]))
destinations = poisoned(model)
def asking(name):
    signal.raise_signal(signal.SIGINT)
    return destinations[name]
try:
    load_weights(source, model, asking, None)
except KeyboardInterrupt:
    print("interrupted", [each.name for each in threading.enumerate()])
"""


def test_ctrl_c_ends_the_load_and_the_process_can_go_on(tmp_path):
    write_folder(tmp_path, checkpoint_tensors())
    command = [sys.executable, "-c", INTERRUPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "interrupted ['MainThread']\n"), done.stderr
