"""Every record, wait and join in `prefetch.py` is needed: without it, or out of order, the virtual GPU raises.

The source is changed one site at a time and run through the same scenarios. Most of these mutants compute the right
tokens here, so that nothing but the order of operators can tell them apart.
"""

import ast
import copy
import functools
import inspect
import sys
import types
from unittest import mock

import pytest
import torch

from offload import prefetch as original
from offload.backend import specs_of, weights_of
from offload.config import OffloadConfig
from offload.plan import plan
from offload.virtual import CaptureError, RaceError, StampError, VirtualDevice
from tests.toys import TOKENS, Toy, prefetch

SOURCE = inspect.getsource(original)
SITES = {"record", "wait", "_await", "join", "forget", "_ensure", "fill", "stamp"}
"""Calls whose removal must show; not `check_stamp`, which is the witness."""
OPERATIONS = {"copy", "_onload"}
"""Calls that issue work, which records and waits put in order."""
OLD_RING = "always (k + s) % M"
OLD_RING_ALONE = "always (k + s) % M, and no layer is loaded on the spot"


def called(statement):
    """Name of the method that a statement calls, or ""."""
    is_call = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    return statement.value.func.attr if is_call and isinstance(statement.value.func, ast.Attribute) else ""


def blocks(tree):
    """(name of the function, statements) of every block in the functions of a module."""
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for node in ast.walk(function):
            for body in [getattr(node, "body", None), getattr(node, "orelse", None)]:
                if isinstance(body, list) and node is not function or body is getattr(function, "body", None):
                    yield function.name, body


def removals():
    """(id, source) with one site removed."""
    for where, (name, body) in enumerate(list(blocks(ast.parse(SOURCE)))):
        for index, statement in enumerate(body):
            if called(statement) in SITES:
                tree = ast.parse(SOURCE)
                changed = list(blocks(tree))[where][1]
                changed[index] = ast.copy_location(ast.Pass(), statement)
                yield f"no {called(statement)} in {name}", ast.unparse(tree)


def swaps():
    """(id, source) with a record or wait exchanged with the operation that it orders."""
    for where, (name, body) in enumerate(list(blocks(ast.parse(SOURCE)))):
        for first, before in enumerate(body):
            for second in range(first + 1, len(body)):
                pair = called(before), called(body[second])
                if {*pair} & {"record", "wait"} and {*pair} & OPERATIONS:
                    tree = ast.parse(SOURCE)
                    changed = list(blocks(tree))[where][1]
                    changed[first], changed[second] = changed[second], changed[first]
                    yield f"{pair[0]} after {pair[1]} in {name}", ast.unparse(tree)


def moves():
    """(id, source) with a record or wait on the wrong side of the layer's kernels, or with the ring of old."""
    for name, old, new in [
        (
            "slot free before the kernels",
            "        self._device.check_stamp(layer.slot.buffer, layer.index)\n",
            "        self._device.check_stamp(layer.slot.buffer, layer.index)\n"
            "        self._device.record(layer.slot.free)\n",
        ),
        ("await after the kernels", "        self._await(layer.slot)\n", ""),
        (OLD_RING, "plan.next_owner(ordinal))", "(ordinal + len(slots)) % len(plan.offloaded_layers))"),
        (OLD_RING_ALONE, "plan.next_owner(ordinal))", "(ordinal + len(slots)) % len(plan.offloaded_layers))"),
    ]:
        assert SOURCE.count(old) == 1, name
        source = SOURCE.replace(old, new)
        if name.startswith("slot free"):
            record = "            self._device.record(layer.slot.free)\n            self._onload"
            assert source.count(record) == 1
            source = source.replace(record, "            self._onload")
        if name.startswith("await"):
            leave = "        if layer.follower != ordinal:\n"
            assert source.count(leave) == 1
            source = source.replace(leave, "        self._await(layer.slot)\n" + leave)
        if name == OLD_RING_ALONE:
            source = source.replace("        self._ensure(ordinal)\n        self._await", "        self._await")
        yield name, source


# -- scenarios ---------------------------------------------------------------------------------------------------------


@functools.cache
def backend_class(source):
    """The `PrefetchBackend` of a source."""
    module = types.ModuleType("offload.prefetch_changed")
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        exec(compile(source, "prefetch_changed.py", "exec"), module.__dict__)
    return module.PrefetchBackend


class Stage:
    """One offloaded toy model on a virtual GPU, with the backend of a given source."""

    def __init__(self, source, layers, step):
        self.device = VirtualDevice("h200-pcie5")
        self.model = Toy([3, 5, 4, 6, 2, 7][:layers])
        self.expected = self.logits_of(copy.deepcopy(self.model))
        weights = weights_of(self.model, self.model.layers)
        planned = plan(specs_of(weights), OffloadConfig.of(prefetch(1, 1, step)))
        self.backend = backend_class(source)(weights, planned, self.device)
        for weight in weights:
            self.backend.destination(weight.name).copy_(self.model.get_parameter(weight.name).detach())
        self.backend.detach()
        self.backend.attach(self.model, self.model.layers)

    @staticmethod
    def logits_of(model):
        with torch.inference_mode():
            return model(TOKENS)

    def passes(self, count):
        with self.device.active():
            for _ in range(count):
                out = self.model(TOKENS)
        assert self.device.to_host(out) == self.expected.tolist()

    def fail_in(self, layer, before_kernels):
        """One pass that ends with an exception in a layer."""

        def fail(*_):
            raise KeyboardInterrupt

        module = self.model.layers[layer]
        handle = (
            module.norm.register_forward_pre_hook(fail) if before_kernels else module.down.register_forward_hook(fail)
        )
        with self.device.active(), pytest.raises(KeyboardInterrupt):
            self.model(TOKENS)
        handle.remove()

    def capture(self):
        out = []

        def body():
            out.append(self.model(TOKENS))
            self.backend.before_capture_ends()

        with self.device.active():
            self.backend.before_capture()
            try:
                graph = self.device.capture(body)
            finally:
                self.backend.after_capture()
        return graph, out[0]

    def replay(self, captured, count):
        with self.device.active():
            self.backend.before_capture()
            for _ in range(count):
                captured[0].replay()
        assert self.device.to_host(captured[1]) == self.expected.tolist()


def repeated_passes(source):
    for layers, step in ((1, 1), (3, 1), (3, 2), (4, 2), (5, 3), (2, 2), (2, 3)):
        Stage(source, layers, step).passes(3)


def failures(source):
    for layer in range(3):
        for before_kernels in (True, False):
            stage = Stage(source, 3, 2)
            stage.passes(1)
            stage.fail_in(layer, before_kernels)
            stage.passes(2)


def graphs(source):
    for layers, step in ((3, 1), (3, 2), (4, 2), (2, 2)):
        stage = Stage(source, layers, step)
        captured = stage.capture()
        stage.replay(captured, 2)
        stage.passes(2)
        stage.replay(captured, 1)
        stage.fail_in(1, False)
        stage.replay(captured, 1)
        stage.replay(stage.capture(), 1)


def graph_after_a_failure(source):
    stage = Stage(source, 3, 2)
    stage.fail_in(1, False)
    stage.replay(stage.capture(), 2)
    stage.passes(1)


def failed_capture(source):
    for layer in range(4):
        stage = Stage(source, 4, 2)
        handle = stage.model.layers[layer].down.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            stage.capture()
        handle.remove()
        stage.passes(2)
        stage.replay(stage.capture(), 1)


def interrupt(*_):
    raise KeyboardInterrupt


SCENARIOS = (repeated_passes, failures, graphs, graph_after_a_failure, failed_capture)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_the_source_as_it_is(scenario):
    scenario(SOURCE)


MUTANTS = dict([*removals(), *swaps(), *moves()])
FIRST_FILL = MUTANTS.pop("no fill in _register_hooks")  # orders nothing: the first pass would load its layers itself


@pytest.mark.parametrize("name", MUTANTS)
def test_a_changed_source_raises(name):
    with pytest.raises((RaceError, CaptureError, StampError)):
        for scenario in SCENARIOS:
            scenario(MUTANTS[name])


def test_the_ring_of_old_is_caught_by_its_stamps():
    with pytest.raises(StampError, match="is about to read slot"):
        repeated_passes(MUTANTS[OLD_RING_ALONE])
    # A layer that is loaded on the spot is right again, at the cost of a copy; a graph was captured without that copy.
    with pytest.raises(StampError, match="is about to read slot"):
        graphs(MUTANTS[OLD_RING])


def test_the_ring_of_old_copies_more_than_was_planned():
    def copies_of_a_pass(source):
        stage = Stage(source, 3, 2)
        stage.passes(2)
        before = len(stage.device.issuer.simulator.log[-1])
        stage.passes(1)
        return sum(entry.kind == "copy" for entry in stage.device.issuer.simulator.log[-1][before:])

    planned = 2  # of three layers in two slots, one has its slot for itself
    assert copies_of_a_pass(SOURCE) == planned < copies_of_a_pass(MUTANTS[OLD_RING])


def test_the_first_layers_are_on_their_way_before_the_first_pass():
    def copies_before_the_first_pass(source):
        return sum(entry.kind == "copy" for entry in Stage(source, 3, 2).device.issuer.simulator.log[-1])

    assert copies_before_the_first_pass(SOURCE) == 2
    assert FIRST_FILL != SOURCE and not Stage(FIRST_FILL, 3, 2).device.issuer.simulator.log
