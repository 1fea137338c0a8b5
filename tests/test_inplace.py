"""`offload_` on any module: the same outputs, every weight back, and nothing half-done whatever fails."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offload
from offload.cpu import CpuDevice
from offload.device import FreeMemory
from offload.errors import ModelLoadError, OffloadConfigError
from offload.guard import is_guarded
from offload.layers import find_layers
from offload.linear import HostLinear
from tests.toys import TOKENS, Toy, logits

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")

CONFIGS = {
    "uva-all": {"uva": {"cpu_offload_gb": 1}},
    "uva-part": {"uva": {"cpu_offload_gb": 600 / 2**30}},
    "uva-selected": {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["up", "norm"]}},
    "prefetch-all": {"prefetch": {"offload_group_size": 1, "offload_prefetch_step": 2}},
    "prefetch-half": {"prefetch": {"offload_group_size": 2, "offload_prefetch_step": 1}},
    "prefetch-selected": {"prefetch": {"offload_group_size": 1, "offload_params": ["down", "gain"]}},
}
UVA, PREFETCH = CONFIGS["uva-all"], CONFIGS["prefetch-all"]


def snapshot(module):
    """Everything that `restore()` must bring back: objects, bytes, flags, layout, classes, hooks."""
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    return {
        "objects": {name: id(tensor) for name, tensor in tensors.items()},
        "bytes": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "flags": {name: tensor.requires_grad for name, tensor in tensors.items()},
        "strides": {name: tensor.stride() for name, tensor in tensors.items()},
        "classes": {name: type(each) for name, each in module.named_modules()},
        "hooks": {
            name: [list(each._forward_pre_hooks.values()), list(each._forward_hooks.values())]
            for name, each in module.named_modules()
        },
        "state hooks": {
            name: [len(each._state_dict_hooks), len(each._load_state_dict_pre_hooks)]
            for name, each in module.named_modules()
        },
    }


def assert_as_before(module, before):
    after = snapshot(module)
    for name, tensor in before.pop("bytes").items():
        assert tensor.is_meta or torch.equal(after["bytes"][name], tensor), name
    after.pop("bytes")
    assert after == before


def odd_toy():
    """A toy with a frozen weight, a transposed one, a buffer, and two layers that share a weight."""
    toy = Toy([5, 8, 8, 3])
    toy.layers[1].up.weight = nn.Parameter(toy.layers[1].up.weight.detach().t().contiguous().t())
    toy.layers[2].up.weight.requires_grad_(False)
    toy.layers[0].register_buffer("mask", torch.arange(3))
    toy.layers[3].norm.weight = toy.layers[0].norm.weight
    assert not toy.layers[1].up.weight.is_contiguous()
    return toy


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_outputs_are_the_same_and_every_weight_comes_back(config):
    toy = odd_toy()
    expected, before = logits(toy), snapshot(toy)
    handle = offload.offload_(toy, config, device="cpu")
    assert handle.report().offloaded_bytes == handle.plan.offloaded_bytes > 0
    for _ in range(3):
        assert torch.equal(logits(toy), expected)
    assert not any(parameter.requires_grad for parameter in toy.parameters())
    handle.restore()
    assert_as_before(toy, before)
    assert torch.equal(logits(toy), expected)
    handle.restore()
    handle.close()
    handle.close()
    report = handle.report()
    assert (report.offloaded_bytes, report.locked_bytes, report.survivors) == (0, 0, ())
    toy(TOKENS).sum().backward()
    assert toy.layers[0].down.weight.grad is not None


def test_close_alone_restores():
    toy = odd_toy()
    before = snapshot(toy)
    with offload.offload_(toy, PREFETCH, device="cpu"):
        logits(toy)
    assert_as_before(toy, before)


def test_restored_weights_survive_the_slab():
    toy = odd_toy()
    expected = logits(toy)
    handle = offload.offload_(toy, UVA, device="cpu")
    memory = weakref.ref(handle._backend._slab.memory.untyped_storage())
    handle.close()
    gc.collect()
    assert memory() is None
    assert torch.equal(logits(toy), expected)


def test_originals_are_emptied_so_that_nothing_exists_twice():
    toy = odd_toy()
    held = dict(toy.named_parameters())
    with offload.offload_(toy, UVA, device="cpu") as handle:
        assert all(held[name].numel() == 0 for name in handle.plan.offloaded if name in held)
        assert held["embed.weight"].numel() > 0
        assert toy.embed.weight is held["embed.weight"]
        assert toy.head.weight is toy.embed.weight


def test_linears_with_a_host_weight_read_it_in_place():
    toy = Toy([5, 8])
    with offload.offload_(toy, CONFIGS["uva-selected"], device="cpu"):
        assert type(toy.layers[0].up) is HostLinear
        assert type(toy.layers[0].down) is nn.Linear
    assert type(toy.layers[0].up) is nn.Linear


@pytest.mark.parametrize("config", [UVA, PREFETCH], ids=["uva", "prefetch"])
def test_state_dict_has_true_values_and_saves(config, tmp_path):
    toy = Toy([5, 8, 8])
    before = {name: tensor.clone() for name, tensor in toy.state_dict().items()}
    with offload.offload_(toy, config, device="cpu"):
        logits(toy)
        state = toy.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
        del state["head.weight"]
        save_file(state, tmp_path / "state.safetensors")
    saved = load_file(tmp_path / "state.safetensors")
    assert all(torch.equal(saved[name], before[name]) for name in saved) and len(saved) == len(before) - 1


def test_user_hooks_keep_their_order():
    toy, calls = Toy([5, 8]), []
    layer = toy.layers[1]
    layer.register_forward_pre_hook(lambda *_: calls.append("first before"))
    layer.register_forward_pre_hook(lambda *_: calls.append("second before"))
    layer.register_forward_hook(lambda *_: calls.append("first after"))
    with offload.offload_(toy, PREFETCH, device="cpu"):
        layer.register_forward_hook(lambda *_: calls.append("second after"))
        logits(toy)
        assert calls == ["first before", "second before", "first after", "second after"]
    calls.clear()
    logits(toy)
    assert calls == ["first before", "second before", "first after", "second after"]


@pytest.mark.parametrize("config", [UVA, PREFETCH], ids=["uva", "prefetch"])
def test_what_an_offloaded_module_refuses(config):
    toy = Toy([5, 8, 8])
    expected = logits(toy)
    with offload.offload_(toy, config, device="cpu"):
        for refused, text in (
            (lambda: copy.deepcopy(toy), "cannot be copied or pickled"),
            (lambda: copy.deepcopy(toy.layers[1]), "cannot be copied or pickled"),
            (lambda: toy.half(), "Toy is offloaded and cannot be moved or converted"),
            (lambda: toy.to("meta"), "Toy is offloaded and cannot be moved or converted"),
            (lambda: toy(TOKENS), "runs without autograd only: use torch.inference_mode()"),
            (lambda: toy.load_state_dict(toy.state_dict()), "restore the model first"),
            (lambda: offload.offload_(toy, config, device="cpu"), "Toy is offloaded already: close() its handle first"),
            (lambda: offload.offload_(nn.Sequential(toy), config, device="cpu"), "is offloaded already"),
        ):
            with pytest.raises(ValueError) as refusal:
                refused()
            assert text in str(refusal.value)
            assert torch.equal(logits(toy), expected)
    copy.deepcopy(toy)
    toy.to(torch.float64)


def test_classes_are_left_alone():
    toy, other = Toy([5]), Toy([5], seed=1)
    members = dict(vars(Toy)), dict(vars(nn.Linear)), dict(vars(nn.Module))
    with offload.offload_(toy, UVA, device="cpu"):
        assert isinstance(toy, Toy) and type(toy).__name__ == "Toy"
        assert (dict(vars(Toy)), dict(vars(nn.Linear)), dict(vars(nn.Module))) == members
        assert type(other) is Toy and type(other.layers[0].up) is nn.Linear
        other(TOKENS).sum().backward()
    assert type(toy) is Toy


def graded():
    toy = Toy([5])
    toy(TOKENS).sum().backward()
    return toy


def with_subclass():
    toy = Toy([5])

    class Special(nn.Parameter):
        pass

    toy.layers[0].up.weight = Special(toy.layers[0].up.weight.detach())
    return toy


@pytest.mark.parametrize(
    ("make", "config", "options", "kind", "text"),
    [
        (graded, UVA, {}, ValueError, '"embed.weight" and 7 more has a gradient: finish the training step'),
        (with_subclass, UVA, {}, ValueError, 'weight "layers.0.up.weight" is no plain dense parameter (Special'),
        (lambda: Toy([5]).to("meta"), UVA, {}, ValueError, 'weight "embed.weight" has no data (it is on meta)'),
        (lambda: Toy([5]), {}, {}, OffloadConfigError, "the offload config is not enabled"),
        (lambda: Toy([5]), None, {}, OffloadConfigError, "the offload config is not enabled"),
        (lambda: nn.Linear(3, 3), UVA, {}, OffloadConfigError, "Linear has no ModuleList with parameters"),
        (lambda: Toy([5]), UVA, {"layers": "blocks"}, OffloadConfigError, 'choose one of "layers ('),
        (
            lambda: Toy([5]),
            {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["upp"]}},
            {},
            OffloadConfigError,
            'selector "upp" matches no parameter',
        ),
        (lambda: Toy([5]), UVA, {"device": "tpu"}, ModelLoadError, 'no device "tpu" here'),
    ],
    ids=["gradient", "subclass", "meta", "disabled", "none", "no-layers", "no-such-list", "selector", "device"],
)
def test_what_cannot_be_offloaded_is_refused_and_left_as_it_is(make, config, options, kind, text):
    toy = make()
    before = snapshot(toy)
    with pytest.raises(kind) as refusal:
        offload.offload_(toy, config, **{"device": "cpu", **options})
    assert text in str(refusal.value)
    assert_as_before(toy, before)


class FailingDevice(CpuDevice):
    """Raises at the n-th call of one of its methods."""

    def __init__(self, method, count, error):
        super().__init__()
        plain = getattr(self, method)
        left = [count]

        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                raise error
            return plain(*args, **kwargs)

        setattr(self, method, call)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ModelLoadError("full")], ids=["ctrl-c", "error"])
@pytest.mark.parametrize("config", [UVA, PREFETCH], ids=["uva", "prefetch"])
@pytest.mark.parametrize("method", ["allocate_host", "allocate_device", "device_view", "residency", "copy"])
def test_a_failure_half_way_rolls_everything_back(method, config, error):
    toy = odd_toy()
    before, expected = snapshot(toy), logits(toy)
    device = FailingDevice(method, 2 if method == "copy" else 1, error)
    try:
        offload.offload_(toy, config, device=device).close()
    except BaseException as raised:
        assert raised is error
        raised.__traceback__ = None  # its frames look at the memory
    gc.collect()
    assert not is_guarded(toy)
    assert_as_before(toy, before)
    assert torch.equal(logits(toy), expected)
    assert not device._host_ranges
    with offload.offload_(toy, config, device="cpu"):
        assert torch.equal(logits(toy), expected)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_ctrl_c_while_weights_are_copied_rolls_everything_back(count, monkeypatch):
    toy = odd_toy()
    before = snapshot(toy)
    from offload.uva import UvaBackend

    plain, left = UvaBackend.destination, [count]

    def destination(self, name):
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt
        return plain(self, name)

    monkeypatch.setattr(UvaBackend, "destination", destination)
    with pytest.raises(KeyboardInterrupt):
        offload.offload_(toy, UVA, device="cpu")
    assert_as_before(toy, before)


class SmallDevice(CpuDevice):
    """Has no host memory left when it is asked from outside its own allocations."""

    full = False

    def host_memory(self):
        return FreeMemory(1000, 2**30) if self.full else super().host_memory()


def test_without_room_to_restore_the_module_stays_offloaded_and_usable():
    toy, device = Toy([40, 40]), SmallDevice()
    before, expected = snapshot(toy), logits(toy)
    handle = offload.offload_(toy, UVA, device=device)
    device.full = True
    for end in (handle.restore, handle.close):
        with pytest.raises(ModelLoadError, match=r"needs .* GiB, has .* GiB; free some; the model stays offloaded"):
            end()
        assert is_guarded(toy)
        assert torch.equal(logits(toy), expected)
    device.full = False
    handle.close()
    assert_as_before(toy, before)


def test_one_forward_at_a_time():
    """A second thread waits, and Ctrl-C in a forward lets it in."""
    toy = Toy([5, 8, 8])
    expected = logits(toy)
    inside, go_on, answers = threading.Event(), threading.Event(), []

    def pause(*_):
        if threading.current_thread() is first:
            inside.set()
            assert go_on.wait(20)

    with offload.offload_(toy, PREFETCH, device="cpu"):
        toy.layers[1].register_forward_hook(pause)
        first, second = (threading.Thread(target=lambda: answers.append(logits(toy))) for _ in range(2))
        first.start()
        assert inside.wait(20)
        second.start()
        second.join(0.05)
        assert second.is_alive() and not answers
        go_on.set()
        first.join(20)
        second.join(20)
        assert len(answers) == 2 and all(torch.equal(answer, expected) for answer in answers)

        def interrupt(*_):
            raise KeyboardInterrupt

        handle = toy.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            logits(toy)
        handle.remove()
        third = threading.Thread(target=lambda: answers.append(logits(toy)))
        third.start()
        third.join(20)
        assert torch.equal(answers[2], expected)


class Nested(nn.Module):
    """Lists inside lists, and a second list of the same size."""

    def __init__(self):
        super().__init__()
        self.towers = nn.ModuleList([nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])])
        self.small = nn.ModuleList([nn.Linear(2, 2)])
        self.empty = nn.ModuleList()


def test_the_outermost_of_the_largest_lists_is_taken():
    assert find_layers(Nested())[0] == "towers"
    assert find_layers(Nested(), "towers.0")[0] == "towers.0"
    with pytest.raises(OffloadConfigError, match=r'"empty" has no parameters: choose one of "towers \('):
        find_layers(Nested(), "empty")


def test_layers_can_be_named():
    toy = nn.Module()
    toy.large, toy.small = Toy([30, 30]), Toy([4])
    toy.forward = lambda tokens: toy.small(tokens) + toy.large(tokens)
    expected = logits(toy)
    with offload.offload_(toy, UVA, layers="small.layers", device="cpu") as handle:
        assert all(name.startswith("small.layers.0.") for name in handle.plan.offloaded)
        assert torch.equal(logits(toy), expected)


def test_two_models_in_one_process_do_not_meet():
    toys = [Toy([5, 8, 8], seed) for seed in range(2)]
    expected = [logits(toy) for toy in toys]
    with offload.offload_(toys[0], UVA, device="cpu"), offload.offload_(toys[1], PREFETCH, device="cpu"):
        for _ in range(2):
            assert all(torch.equal(logits(toy), answer) for toy, answer in zip(toys, expected, strict=True))
