"""On a GPU: the tokens of the CPU, eager and from a graph, and the same bits when layers are prefetched."""

import pytest

import offload
from tests.engines import CONFIGS
from tests.tiny_folder import write_model

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 3, 96, 1, 44], [11, 12], [90]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny"))


def three_times(folder, device, config=None, dtype="float32", graph=False):
    """The tokens of three generations in a row, which must be equal."""
    with offload.load(folder, config, device, dtype, graph=graph) as engine:
        runs = [[one.token_ids for one in engine.generate(PROMPTS, 9, stop_at_eos=False)] for _ in range(3)]
        assert runs[0] == runs[1] == runs[2]
        if config:
            report = engine.report()
            assert report.locked_bytes >= report.offloaded_bytes > 0
    assert engine.report().survivors == ()
    return runs[0]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_tokens_are_those_of_the_cpu(graph, folder):
    assert three_times(folder, "cuda", graph=graph) == three_times(folder, "cpu")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("prefetch")])
def test_prefetched_layers_give_the_same_bits(name, graph, folder):
    expected = three_times(folder, "cuda", dtype="bfloat16", graph=graph)
    assert three_times(folder, "cuda", CONFIGS[name], "bfloat16", graph) == expected


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("uva")])
def test_weights_read_in_place_give_the_same_tokens(name, graph, folder):
    # In float32 the error of a product is far below the distance of any two logits of this model.
    assert three_times(folder, "cuda", CONFIGS[name], graph=graph) == three_times(folder, "cpu")
