"""The probe reads what it says: every word once, whatever the programs, stages and requests."""

import pytest
import torch

from offload_kernels import link, probe
from tests.kernels.interpret.counting import LoadCounter

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [32, 75])
@pytest.mark.parametrize("programs, request_bytes", [(1, 8192), (3, 2048), (8, 4096)])
def test_checksum_equals_the_cpus(rows, programs, request_bytes):
    words = torch.randint(-(2**31), 2**31, (rows, link.ROW_BYTES // 4), dtype=torch.int32)
    with LoadCounter() as counter:
        watched = counter.watch(words)
        got = link.read_checksum(words, programs, request_bytes, 2, CPU)
    assert got == link.checksum(words)
    watched.assert_each_element_loaded_once_by_one_program()


def test_a_word_that_is_not_read_shows_in_the_checksum():
    words = link.host_words(1 << 20)
    assert link.read_checksum(words[:-1], 8, 8192, 2, CPU) != link.checksum(words)


def test_host_words_are_all_different():
    words = link.host_words(70 << 20)
    assert torch.equal(words.view(-1), torch.arange(words.numel(), dtype=torch.int32))


def test_words_go_on_where_int32_ends():
    assert [link.as_signed(word) for word in (0, 2**31 - 1, 2**31, 2**32 - 1, 2**32)] == [0, 2**31 - 1, -(2**31), -1, 0]


def point(engine: str, footprint_bytes: int, bytes_per_s: float) -> link.Measurement:
    return link.Measurement(engine, footprint_bytes, 8, 4, 128, footprint_bytes / bytes_per_s, bytes_per_s)


def test_rates_are_the_best_at_the_largest_footprint():
    found = [point("sm", 1, 9.0), point("ce", 1, 9.5), point("sm", 2, 4.0), point("sm", 2, 5.0), point("ce", 2, 6.0)]
    rates = link.rates_of(found)
    assert (rates.sm_bytes_per_s, rates.ce_bytes_per_s) == (5.0, 6.0)
    assert rates.measurements == tuple(found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_gpu_is_told(device):
    with pytest.raises(RuntimeError, match="run it where there is one"):
        probe(device)
