"""Loading the example model in a process of its own: nothing exists twice, and a load after a load needs no more."""

import json
import subprocess
import sys

import pytest

from bench.prepare import SMOLLM2, prepare_smollm2
from tests.engines import prefetch, uva

MIB = 1 << 20

MEASURE = """
import gc, json, os, sys, threading, warnings
import offload, offload.engine, offload.prefetch, offload.uva

def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    global peak
    while not done.wait(0.002):
        peak = max(peak, anonymous())

warnings.simplefilter("ignore")
for _ in range(2):
    before = peak = anonymous()
    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    engine = offload.load(sys.argv[1], sys.argv[2], "cpu")
    done.set(); watcher.join()
    loaded, report = max(peak, anonymous()) - before, engine.report()
    engine.generate(["Once upon a time"], 2)
    engine.close()
    del engine
    gc.collect()
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    print(json.dumps([loaded, report.locked_bytes + report.device_bytes, anonymous(), threads, files]))
"""


@pytest.mark.parametrize("config", [uva(0.1), prefetch(2, 1, 1)], ids=["uva", "prefetch"])
def test_a_load_needs_what_was_planned_and_the_next_one_no_more(config):
    prepare_smollm2(SMOLLM2)
    command = [sys.executable, "-c", MEASURE, str(SMOLLM2), json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded, planned, left, threads, files = zip(*map(json.loads, done.stdout.splitlines()), strict=True)
    assert planned[0] > 250 * MIB and len(set(planned)) == 1
    assert all(grown <= planned[0] + 64 * MIB for grown in loaded)
    # Allocators keep a part of what the tokenizer had; weights on either side that stayed would be 100 MiB or more.
    assert left[1] <= left[0] + 64 * MIB
    assert set(threads) == {1} and len(set(files)) == 1
