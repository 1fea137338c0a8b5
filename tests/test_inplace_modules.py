"""`offload_` on modules and parameters of many kinds: the same outputs, or a refusal that says what to do."""

import gc
import pickle
import signal
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import offload
from offload import guard
from offload.backend import Backend
from offload.device import open_device
from offload.originals import Original
from tests.test_inplace import CONFIGS, PREFETCH, UVA, assert_as_before, odd_toy, snapshot
from tests.toys import TOKENS, Toy, logits

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")

WIDTH = 8
BOTH = pytest.mark.parametrize("config", [UVA, PREFETCH], ids=["uva", "prefetch"])


class Chain(nn.Module):
    """Layers one after another."""

    def __init__(self, make, count=4):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.up(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        return self.cells(x)[0]


class Convolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)
        self.convolve = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.back = nn.ConvTranspose2d(WIDTH, WIDTH, 1)

    def forward(self, x):
        image = x.view(-1, WIDTH, 1, 5).contiguous(memory_format=torch.channels_last)
        image = image + self.back(functional.silu(self.convolve(self.norm(image))))
        return image.reshape(x.shape)


class Kinds(nn.Module):
    """Parameters in dtypes and containers that a linear layer does not have."""

    def __init__(self):
        super().__init__()
        whole = torch.randint(-9, 9, (WIDTH, WIDTH))
        self.codes = nn.Parameter(whole.to(torch.int8), requires_grad=False)
        self.quarter = nn.Parameter(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn), requires_grad=False)
        self.phase = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
        self.kept = nn.Parameter(torch.rand(WIDTH) > 0.5, requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.sliced = nn.Parameter(torch.randn(WIDTH, 3 * WIDTH)[:, 3 : 3 + WIDTH])
        self.several = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH, WIDTH)])
        self.named = nn.ParameterDict({"bias": torch.randn(WIDTH)})

    def forward(self, x):
        x = x @ (self.codes.float() * self.quarter.float() / 20) * self.kept
        x = x + (x.to(torch.complex64) @ self.phase).real * self.scale
        return torch.tanh(x @ self.sliced @ self.several[1] + self.several[0] + self.named["bias"])


class Pairs(nn.Module):
    """Layers that are lists or dictionaries of modules, which nobody calls."""

    def __init__(self, pair):
        super().__init__()
        self.layers = nn.ModuleList(pair(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(4))
        self.layers.append(self.layers[1])

    def forward(self, x):
        for pair in self.layers:
            norm, linear = pair.values() if isinstance(pair, nn.ModuleDict) else pair
            x = x + linear(norm(x))
        return x


class Outside(Chain):
    """A head that shares the weight of a layer."""

    def __init__(self):
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.layers[1].weight

    def forward(self, x):
        return self.head(super().forward(x))


def hooked():
    """User hooks on the root, of every kind."""
    chain = Chain(Block)
    chain.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    chain.register_forward_hook(lambda module, args, output: output + 1)
    chain.register_full_backward_hook(lambda *_: None)
    return chain


def encoder():
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 3).eval()


MODULES = {
    "lists": lambda: Pairs(lambda *pair: nn.ModuleList(pair)),
    "dictionaries": lambda: Pairs(lambda norm, linear: nn.ModuleDict({"norm": norm, "linear": linear})),
    "lstm": lambda: Chain(Recurrent),
    "attention": encoder,
    "convolutions": lambda: Chain(Convolution).to(memory_format=torch.channels_last),
    "weight-norm": lambda: Chain(lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))),
    "orthogonal": lambda: Chain(lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))).eval(),
    "kinds": lambda: Chain(Kinds),
    "shared-outside": Outside,
    "data-parallel": lambda: nn.DataParallel(Chain(Block)),
    "root-hooks": hooked,
}


@BOTH
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_modules_of_every_kind_give_the_same_and_come_back(make, config):
    torch.manual_seed(0)
    module, x = make(), torch.randn(2, 5, WIDTH)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1 and parameter.is_floating_point():
                parameter.normal_()  # else all norms and scales are ones, and any layer's would do
    with torch.inference_mode():
        expected = module(x)
    before = snapshot(module)
    with offload.offload_(module, config, device="cpu") as handle, torch.inference_mode():
        assert handle.plan.offloaded
        for _ in range(3):
            assert torch.equal(module(x), expected)
        state = module.state_dict()
        assert all(torch.equal(state[name], before["bytes"][name]) for name in state)
    assert_as_before(module, before)
    with torch.inference_mode():
        assert torch.equal(module(x), expected)


class ByForward(Chain):
    def forward(self, x):
        for layer in self.layers:
            x = layer.forward(x)
        return x


class ByParts(Chain):
    def forward(self, x):
        x = super().forward(x)
        return self.layers[-1].up(x)


@pytest.mark.parametrize(
    ("kind", "config", "first"),
    [
        (ByForward, UVA, "layers.0.norm"),
        (ByForward, PREFETCH, "layers.0.norm"),
        (ByForward, CONFIGS["prefetch-half"], "layers.1.norm"),
        (ByParts, UVA, "layers.3.up"),
        (ByParts, PREFETCH, "layers.3.up"),
    ],
    ids=["forward-uva", "forward-prefetch", "forward-half", "parts-uva", "parts-prefetch"],
)
def test_parts_that_run_without_their_layer_are_refused(kind, config, first):
    """Nothing brings the weights of a layer that is not called: the outputs would be another layer's."""
    chain, x = kind(Block), torch.randn(2, WIDTH)
    expected = chain(x)
    with offload.offload_(chain, config, device="cpu"), torch.no_grad():
        for _ in range(2):
            with pytest.raises(ValueError, match=f'"{first}" ran without its layer being called'):
                chain(x)
    assert torch.equal(chain(x), expected)


def test_weights_that_are_read_where_they_lie_may_be_used_by_anyone():
    chain, x = ByForward(Block), torch.randn(2, WIDTH)
    expected = chain(x)
    config = {"uva": {"cpu_offload_gb": 1, "cpu_offload_params": ["up.weight"]}}
    with offload.offload_(chain, config, device="cpu"), torch.no_grad():
        assert torch.equal(chain(x), expected)


@BOTH
def test_parameters_made_in_inference_mode_stay_of_that_kind(config):
    with torch.inference_mode():
        chain, x = Chain(Block), torch.randn(2, WIDTH)
        expected = chain(x)
    before = snapshot(chain)
    with offload.offload_(chain, config, device="cpu"), torch.no_grad():
        assert torch.equal(chain(x), expected)
    assert_as_before(chain, before)
    assert all(parameter.is_inference() and parameter.requires_grad for parameter in chain.parameters())
    with torch.inference_mode():
        assert torch.equal(chain(x), expected)


@BOTH
def test_a_model_offloaded_in_inference_mode_trains_after_restore(config):
    chain, x = Chain(Block), torch.randn(2, WIDTH)
    with torch.inference_mode():
        expected = chain(x)
        with offload.offload_(chain, config, device="cpu"):
            assert torch.equal(chain(x), expected)
    chain(x).sum().backward()
    assert all(parameter.grad is not None for parameter in chain.parameters())


def test_an_expanded_parameter_is_refused():
    chain = Chain(Block)
    chain.layers[1].up.weight = nn.Parameter(torch.randn(1, WIDTH).expand(WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r'"layers.1.up.weight" is expanded over one memory: make it contiguous\(\)'):
        offload.offload_(chain, UVA, device="cpu")


@BOTH
def test_pickling_is_refused_with_the_reason(config):
    toy = Toy([5, 8])
    with offload.offload_(toy, config, device="cpu"):
        with pytest.raises(ValueError, match="an offloaded model cannot be copied or pickled"):
            pickle.dumps(toy)
    pickle.dumps(toy)


@BOTH
def test_a_part_of_an_offloaded_module_is_not_offloaded_again(config):
    outer = nn.Sequential(Toy([5, 8]))
    with offload.offload_(outer, config, device="cpu"):
        with pytest.raises(ValueError, match="Toy is offloaded already"):
            offload.offload_(outer[0], config, device="cpu")


@BOTH
def test_a_lost_handle_leaves_a_working_module_that_frees_its_memory(config):
    toy = Toy([5, 8, 8])
    expected = logits(toy)
    memory = weakref.ref(offload.offload_(toy, config, device="cpu")._backend._slab.memory.untyped_storage())
    gc.collect()
    for _ in range(2):
        assert torch.equal(logits(toy), expected)
    del toy
    gc.collect()
    assert memory() is None


class Interrupt:
    """Sends a real Ctrl-C at the n-th call of what it wraps, once."""

    def __init__(self, plain, count):
        self.plain, self.left = plain, count

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left == -1:
            signal.raise_signal(signal.SIGINT)
        return self.plain(*args, **kwargs)


@BOTH
@pytest.mark.parametrize("place", ["unguard", "remove_hooks", "detach", "set_grad"])
@pytest.mark.parametrize("during", ["restore", "roll-back"])
def test_ctrl_c_while_weights_are_bound_back_leaves_nothing_half_done(during, place, config, monkeypatch):
    toy = odd_toy()
    before, expected = snapshot(toy), logits(toy)
    if during == "restore":
        handle = offload.offload_(toy, config, device="cpu")
    owner, name, count = {
        "unguard": (offload.inplace, "unguard", 0),
        "remove_hooks": (offload.inplace, "remove_hooks", 0),
        "detach": (Backend, "detach", 0),
        "set_grad": (Original, "hold", 2),
    }[place]
    interrupt = Interrupt(getattr(owner, name), count)
    monkeypatch.setattr(owner, name, lambda *args: interrupt(*args))
    if during == "restore":
        with pytest.raises(KeyboardInterrupt):
            handle.restore()
    else:
        monkeypatch.setattr(offload.inplace, "guard", Interrupt(guard.guard, 0))
        with pytest.raises(KeyboardInterrupt):
            offload.offload_(toy, config, device="cpu")
    assert interrupt.left < -1
    assert_as_before(toy, dict(before))
    assert torch.equal(logits(toy), expected)
    if during == "restore":
        handle.close()
        assert_as_before(toy, before)


@BOTH
def test_a_hook_whose_handle_ctrl_c_took_away_is_removed_all_the_same(config, monkeypatch):
    toy = odd_toy()
    before = snapshot(toy)
    handle = offload.offload_(toy, config, device="cpu")
    handle._backend._handles.clear()
    handle.close()
    assert_as_before(toy, before)


def test_a_foreign_model_on_the_virtual_gpu_may_read_values_and_refuses_grad():
    class Reads(Toy):
        def forward(self, tokens):
            assert (tokens >= 0).all().item()
            return super().forward(tokens)

    toy = Reads([5, 8, 8])
    expected, device = logits(toy), open_device("virtual:h200-pcie5")
    with offload.offload_(toy, UVA, device=device) as handle:
        assert torch.equal(logits(toy), expected)
        device.mark_step("pp")
        assert device.step_report().bus_bytes >= handle.plan.offloaded_bytes
        with pytest.raises(ValueError, match="runs without autograd only"):
            toy(TOKENS)
    assert torch.equal(logits(toy), expected)
