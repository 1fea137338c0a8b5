"""The same tokens, bit for bit, wherever the weights are; and memory that is given back whatever happens."""

import gc
import threading
import warnings

import pytest
import torch

import offload
from offload.cpu import CpuDevice
from offload.text import gib
from tests.engines import CONFIGS, prefetch, uva
from tests.tiny_folder import write_model

PROMPTS = [[5, 3, 96, 1, 44], [11, 12], [90]]
NEW = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=False, attention_bias=True, mlp_bias=True)


def opened(folder, config=None, dtype=None, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", offload.OffloadConfigWarning)
        return offload.load(folder, config, options.pop("device", "cpu"), dtype, **options)


def generated(engine):
    return [generation.token_ids for generation in engine.generate(PROMPTS, NEW, stop_at_eos=False)]


@pytest.fixture(scope="module")
def without_offload(folder):
    tokens = {}
    for dtype in (torch.float32, torch.bfloat16):
        with opened(folder, dtype=dtype) as engine:
            tokens[dtype] = generated(engine)
    return tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_the_same_three_times_in_a_row(name, dtype, folder, without_offload):
    with opened(folder, CONFIGS[name], dtype) as engine:
        report = engine.report()
        assert report.offloaded_bytes > 0
        if "mlp" not in name and "prefetch" in name and "norm" not in name:
            assert report.slot_bytes > 0
        for _ in range(3):
            assert generated(engine) == without_offload[dtype]


def test_an_interrupted_layer_does_not_spoil_the_next_generation(folder, without_offload):
    for config in (uva(1), prefetch(2, 1, 2), prefetch(1, 1, 2)):
        with opened(folder, config) as engine:
            for layer in (0, 3, 5):
                calls = []

                def interrupt(module, args, calls=calls):
                    calls.append(1)
                    if len(calls) == 3:
                        raise KeyboardInterrupt

                handle = engine.parts.model.layers[layer].mlp.register_forward_pre_hook(interrupt)
                with pytest.raises(KeyboardInterrupt):
                    generated(engine)
                handle.remove()
                assert generated(engine) == without_offload[torch.float32]


class WatchedDevice(CpuDevice):
    """A CPU that remembers what it gave."""

    def __init__(self):
        super().__init__()
        self.mapped = []

    def _map(self, nbytes):
        memory = super()._map(nbytes)
        self.mapped.append(torch.multiprocessing.reductions.StorageWeakRef(memory.untyped_storage()))
        return memory

    @property
    def alive(self):
        gc.collect()
        return sum(not reference.expired() for reference in self.mapped)


@pytest.mark.parametrize("config", [None, uva(1), prefetch(2, 1, 2)], ids=["none", "uva", "prefetch"])
def test_whatever_ends_a_load_gives_everything_back(config, folder, monkeypatch):
    device, threads = WatchedDevice(), threading.active_count()
    for error in (KeyboardInterrupt, RuntimeError):
        with monkeypatch.context() as patched:

            def fail(*_, error=error):
                raise error

            patched.setattr("offload.models.dense.LlamaForCausalLM.prepare", fail)
            with pytest.raises(error):
                opened(folder, config, device=device)
        assert device.mapped and device.alive == 0
        assert threading.active_count() == threads
    engine = opened(folder, config, device=device)
    generated(engine)
    engine.close()
    assert device.alive == 0 and engine.report().survivors == ()


@pytest.mark.parametrize("config", [None, uva(1), prefetch(2, 1, 2)], ids=["none", "uva", "prefetch"])
def test_the_second_load_reports_the_memory_of_the_first(config, folder):
    reports = []
    for _ in range(2):
        with opened(folder, config) as engine:
            generated(engine)
            reports.append(engine.report())
    assert reports[0] == reports[1]


def test_two_engines_in_one_process_do_not_meet(folder, without_offload):
    with opened(folder, prefetch(1, 1, 2)) as one, opened(folder, uva(1e-5)) as other:
        for _ in range(2):
            assert generated(one) == generated(other) == without_offload[torch.float32]


def test_the_report_names_the_budget_and_what_was_offloaded(folder):
    with opened(folder, uva(1e-5)) as engine:
        report = engine.report()
        assert report.requested_bytes == int(1e-5 * 2**30)
        assert report.offloaded_bytes == engine.parts.plan.offloaded_bytes >= report.requested_bytes
        assert report.locked_bytes >= report.offloaded_bytes


def test_the_backend_and_why_it_was_chosen_are_logged(folder, caplog):
    with caplog.at_level("INFO", "offload"), opened(folder, prefetch(2, 1, 1)) as engine:
        nbytes = gib(engine.parts.plan.offloaded_bytes)
        told = f"backend prefetch (auto, offload_group_size is above 0): {nbytes} of 3 layers offloaded"
        assert caplog.messages == [told]


def test_warnings_of_config_and_plan_are_given_once_each(folder):
    both = {**uva(1), **prefetch(2, 1, 1, "mlp", "nonsense")}
    with pytest.warns() as given, offload.load(folder, both, "cpu"):
        texts = [str(one.message) for one in given if one.category is offload.OffloadConfigWarning]
    assert sum("Both UVA and prefetch offload fields are set" in text for text in texts) == 1
    assert sum('selector "nonsense" matches no parameter of a decoder layer' in text for text in texts) == 1
    assert {one.filename for one in given if "UVA" in str(one.message)} == {__file__}
