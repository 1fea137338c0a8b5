"""prefetch on a CPU, where it really copies: the right layer is in the slot, whatever happened before."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload.prefetch import PrefetchBackend
from offload.virtual import VirtualDevice
from tests.toys import CountingDevice, Toy, logits, offloaded, prefetch

pytestmark = pytest.mark.filterwarnings("ignore::offload.OffloadConfigWarning")


def poison_after_use(model: Toy, backend: PrefetchBackend) -> None:
    """Fill a slot with NaN between its layer's last operator and the next copy, where there will be one.

    Takes the place of a user's hook that was registered before the model was offloaded.
    """
    plan = backend._plan

    def poison(ordinal: int) -> None:
        if plan.next_owner(ordinal) != ordinal:
            backend._buffers[plan.slot_of(ordinal)].memory.fill_(0xFF)

    for ordinal, index in enumerate(plan.offloaded_layers):
        model.layers[index].register_forward_hook(lambda *_, ordinal=ordinal: poison(ordinal))
        model.layers[index]._forward_hooks.move_to_end(next(reversed(model.layers[index]._forward_hooks)), last=False)


def shared_within_a_layer(model: Toy) -> Toy:
    for layer in model.layers:
        layer.norm.bias = layer.norm.weight
    return model


def shared_between_layers(model: Toy) -> Toy:
    for layer in model.layers:
        layer.norm.weight = model.layers[0].norm.weight
    return model


def not_shared(model: Toy) -> Toy:
    return model


@given(
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    group=st.integers(1, 6),
    count=st.integers(1, 6),
    step=st.integers(1, 6),
    share=st.sampled_from([not_shared, shared_within_a_layer, shared_between_layers]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=120)
def test_any_ring_gives_the_plain_model(
    widths: list[int], group: int, count: int, step: int, share: object, dtype: torch.dtype
) -> None:
    count = min(count, group)
    if len(widths) <= group - count:
        return
    model, plain, device = share(Toy(widths)).to(dtype), share(Toy(widths)).to(dtype), CountingDevice()
    backend, planned = offloaded(model, prefetch(group, count, step), device)
    poison_after_use(model, backend)
    assert device.copies == planned.slots
    expected = logits(plain)
    for passes in range(1, 5):
        assert torch.equal(logits(model), expected)
        assert device.copies == planned.slots + passes * planned.copies_per_pass
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    backend.close()


def test_slots_are_as_large_as_their_largest_owner() -> None:
    model = Toy([3, 90, 4, 5, 60])
    backend, planned = offloaded(model, prefetch(1, 1, 2))
    sizes = [buffer.memory.numel() for buffer in backend._buffers]
    assert sizes == list(planned.slot_sizes_bytes) and sizes[0] != sizes[1]
    report = backend.report()
    assert report.slot_bytes == planned.slot_bytes == sum(sizes)
    assert report.offloaded_bytes == planned.offloaded_bytes


def test_layers_of_one_slot_are_views_of_it() -> None:
    model, device = Toy([3, 4, 5]), CountingDevice()
    backend, _ = offloaded(model, prefetch(1, 1, 2), device)
    addresses = [layer.norm.weight.data_ptr() for layer in model.layers]
    assert addresses[0] == addresses[2] != addresses[1]
    assert device.residency(model.layers[0].norm.weight) == "device"
    assert device.residency(backend.destination("layers.0.norm.weight")) == "host"


def test_a_slot_with_one_owner_is_never_refilled() -> None:
    model, device = Toy([3, 4, 5]), CountingDevice()
    backend, planned = offloaded(model, prefetch(1, 1, 5), device)
    logits(model)
    logits(model)
    assert (planned.slots, device.copies, backend.report().slot_bytes) == (3, 3, planned.slot_bytes)


@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_in_any_layer_spoils_no_later_pass(step: int, error: type[BaseException]) -> None:
    model, plain = Toy([3, 4, 5, 6, 7]), Toy([3, 4, 5, 6, 7])
    backend, planned = offloaded(model, prefetch(1, 1, step))
    poison_after_use(model, backend)

    def fail(*_: object) -> None:
        raise error

    for layer in model.layers:
        for where in (layer.norm, layer.down):
            handle = where.register_forward_hook(fail)
            with pytest.raises(error):
                logits(model)
            handle.remove()
            assert torch.equal(logits(model), logits(plain))
    copies = backend._device.copies
    logits(model)
    assert backend._device.copies == copies + planned.copies_per_pass


@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_interrupted_copy_is_made_again(step: int) -> None:
    plain = Toy([3, 4, 5, 6])
    for fail_at in range(1, 10):
        model, device = Toy([3, 4, 5, 6]), CountingDevice()
        backend, _ = offloaded(model, prefetch(1, 1, step), device)
        device.fail_at = device.copies + fail_at
        with pytest.raises(KeyboardInterrupt):
            for _ in range(20):
                logits(model)
        for _ in range(2):
            assert torch.equal(logits(model), logits(plain))
        backend.close()


def test_an_interrupted_first_copy_leaves_a_plain_model() -> None:
    model, device = Toy([3, 4, 5]), CountingDevice()
    device.fail_at = 2
    with pytest.raises(KeyboardInterrupt):
        offloaded(model, prefetch(1, 1, 2), device)
    assert not any(m._forward_pre_hooks or m._forward_hooks or m._state_dict_hooks for m in model.modules())
    assert all(parameter.is_meta for parameter in model.parameters())


def test_layers_may_be_skipped_or_run_out_of_order() -> None:
    model, plain = Toy([3, 4, 5, 6]), Toy([3, 4, 5, 6])
    offloaded(model, prefetch(1, 1, 2))
    x = torch.randn(2, 7)
    with torch.inference_mode():
        for index in (2, 0, 0, 3, 1, 2):
            assert torch.equal(model.layers[index](x), plain.layers[index](x))
    assert torch.equal(logits(model), logits(plain))


def test_hooks_of_the_user_keep_their_order() -> None:
    model, order = Toy([3, 4, 5]), []
    for name in ("first", "second"):
        model.layers[1].register_forward_pre_hook(lambda *_, name=name: order.append(name))
        model.layers[1].register_forward_hook(lambda *_, name=name: order.append(name))
    backend, _ = offloaded(model, prefetch())
    model.layers[1].register_forward_pre_hook(lambda *_: order.append("third"))
    model.layers[1].register_forward_hook(lambda *_: order.append("third"))
    logits(model)
    assert order == ["first", "second", "third"] * 2
    backend.close()
    assert len(model.layers[1]._forward_pre_hooks) == len(model.layers[1]._forward_hooks) == 3


def test_a_users_pre_hook_sees_the_layers_own_weights() -> None:
    model, plain = Toy([3, 4, 5]), Toy([3, 4, 5])
    seen: dict[int, Tensor] = {}
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda m, _, index=index: seen.update({index: m.up.weight.clone()}))
    offloaded(model, prefetch(1, 1, 2))
    handle = model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    handle.remove()
    logits(model)
    assert all(torch.equal(seen[index], layer.up.weight) for index, layer in enumerate(plain.layers))


def test_a_copy_of_the_model_or_of_a_layer_is_refused() -> None:
    model = Toy([3, 4, 5])
    offloaded(model, prefetch(2))
    for target in (model, model.layers[1]):
        with pytest.raises(ValueError, match="offloaded model cannot be copied"):
            copy.deepcopy(target)
    copy.deepcopy(model.layers[0])


def test_after_a_failed_capture_any_layer_may_run_first() -> None:
    # Only a device that does not run what it captures can show this: slots contain what they did before the capture.
    model, plain, device = Toy([3, 4, 5]), Toy([3, 4, 5]), VirtualDevice("h200-pcie5")
    backend, _ = offloaded(model, prefetch(), device)
    handle = model.layers[1].up.register_forward_hook(lambda *_: 1 / 0)
    with device.active(), pytest.raises(ZeroDivisionError):
        captured(model, backend, [])
    handle.remove()
    x = torch.randn(2, 7)
    with device.active():
        result = model.layers[1](x)
    assert torch.equal(result, plain.layers[1](x))


# -- capture; a CPU issues the body again, so this is about what the backend remembers -------------------------------


def captured(model: Toy, backend: PrefetchBackend, results: list[Tensor]) -> object:
    def body() -> None:
        results.append(logits(model))
        backend.before_capture_ends()

    backend.before_capture()
    try:
        return backend._device.capture(body)
    finally:
        backend.after_capture()


@pytest.mark.parametrize("step", [1, 2, 3, 9])
def test_capture_replay_and_eager_passes_mix(step: int) -> None:
    model, plain, results = Toy([3, 4, 5, 6, 7]), Toy([3, 4, 5, 6, 7]), []
    backend, planned = offloaded(model, prefetch(1, 1, step))
    poison_after_use(model, backend)
    graph = captured(model, backend, results)
    copies = backend._device.copies
    for _ in range(3):
        backend.before_capture()
        graph.replay()
        results.append(logits(model))
    # Nothing is loaded twice: a capture, a replay and an eager pass all begin where the one before ended.
    assert backend._device.copies == copies + 6 * planned.copies_per_pass
    assert all(torch.equal(result, logits(plain)) for result in results)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_failed_capture_or_a_failed_pass_before_a_replay(step: int) -> None:
    model, plain, results = Toy([3, 4, 5, 6, 7]), Toy([3, 4, 5, 6, 7]), []
    backend, _ = offloaded(model, prefetch(1, 1, step))
    for layer in model.layers:
        handle = layer.up.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            captured(model, backend, results)
        handle.remove()
        results.append(logits(model))
    graph = captured(model, backend, results)
    handle = model.layers[2].up.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    handle.remove()
    backend.before_capture()
    assert [slot.contents for slot in backend._ring._slots] == [slot.first for slot in backend._ring._slots]
    graph.replay()
    assert all(torch.equal(result, logits(plain)) for result in results)
