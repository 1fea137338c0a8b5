"""Exported kernels: the C compiles without a warning and launches what Python would, on a driver that records."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from offload_kernels import combine, export, grouped, skinny, tiles

SOURCES = Path(__file__).parent / "export"
CUDA_H = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic"]
TOP_K = 4
BF16 = 1
OK, DRIVER, DTYPE, ALIGNMENT, SIZE, SCRATCH = range(6)
FIELDS = {
    "skinny": "dtype x w out x_stride w_stride out_stride M N K scratch scratch_bytes".split(),
    "grouped": (
        "dtype x w13 w2 out x_stride w13_expert_stride w13_stride w2_expert_stride w2_stride "
        "topk_ids topk_weights pairs offsets active T E H I processors scratch scratch_bytes"
    ).split(),
}

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


class Exported:
    """An exported kernel built against the recording driver."""

    def __init__(self, kernel: str, arch: int, folder: Path):
        self.kernel, self.folder = kernel, folder
        self.manifest = export.export(kernel, "bf16", arch, folder, TOP_K)
        self.kernels = self.manifest["kernels"]
        prefix = f"offload_{kernel}_bf16_sm_{arch}"
        types = ["".join({"u64": "q", "u32": "d"}[t] for t in entry["types"]) for entry in self.kernels]
        sizes = [(folder / entry["file"]).stat().st_size for entry in self.kernels]
        (folder / "expected.h").write_text(
            "static const char *const KERNEL_TYPES[] = {" + ", ".join(f'"{t}"' for t in types) + "};\n"
            "static const size_t IMAGE_BYTES[] = {" + ", ".join(map(str, sizes)) + "};\n"
        )
        fields = " ".join(f"TAKE({field})" for field in FIELDS[kernel])
        defines = [f'-DHEADER="{prefix}.h"', f"-DPREFIX={prefix}", f"-DFIELDS={fields}"]
        files = [folder / f"{prefix}.c", SOURCES / "stub_driver.c", SOURCES / "call.c"]
        command = [
            "gcc",
            *WARNINGS,
            *defines,
            f"-I{folder}",
            f"-isystem{CUDA_H}",
            *map(str, files),
            "-o",
            str(folder / "call"),
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr

    def call(self, fail_at: int = 0, **arguments: int) -> tuple[int, int, list[list[str]]]:
        """Status, scratch bytes and the lines of the driver."""
        words = [str(arguments[field]) for field in FIELDS[self.kernel]]
        done = subprocess.run(
            [self.folder / "call", *words], capture_output=True, text=True, check=True, env={"FAIL_AT": str(fail_at)}
        )
        lines = [line.split() for line in done.stdout.splitlines()]
        found = {line[0]: int(line[1]) for line in lines if line[0] in ("status", "scratch")}
        return found["status"], found["scratch"], [line for line in lines if line[0] not in found]

    def launches(self, **arguments: int) -> list[tuple[str, dict[str, int]]]:
        """Each launch as the file of its kernel and its grid, block, shared memory and parameters by name."""
        status, _, lines = self.call(**arguments)
        assert status == OK
        found = []
        for _, number, *values in (line for line in lines if line[0] == "launch"):
            entry = self.kernels[int(number)]
            names = ["gx", "gy", "gz", "bx", "by", "bz", "shared", "stream", "extra", *entry["arguments"]]
            launch = dict(zip(names, map(int, values), strict=True))
            assert (launch["gz"], launch["by"], launch["bz"], launch["stream"], launch["extra"]) == (1, 1, 1, 77, 0)
            assert (launch["bx"], launch["shared"]) == (entry["threads"], entry["shared_bytes"])
            assert launch["global_scratch"] == launch["profile_scratch"] == 0
            found.append((entry["file"], launch))
        return found


@pytest.fixture(scope="module", params=[80, 90], ids=["sm_80", "sm_90"])
def dense(request, tmp_path_factory):
    return request.param, Exported("skinny", request.param, tmp_path_factory.mktemp("skinny"))


@pytest.fixture(scope="module", params=[80, 90], ids=["sm_80", "sm_90"])
def experts(request, tmp_path_factory):
    return request.param, Exported("grouped", request.param, tmp_path_factory.mktemp("grouped"))


def product(M=7, N=4096, K=4096, **changed):
    """Arguments that are in order: distinct addresses, odd strides of the result, enough scratch."""
    base = {"dtype": BF16, "x": 1 << 20, "w": 2 << 20, "out": 3 << 20, "scratch": 4 << 20, "scratch_bytes": 1 << 40}
    return base | {"x_stride": K + 8, "w_stride": K + 64, "out_stride": N + 1, "M": M, "N": N, "K": K} | changed


def layer(T=3, E=32, H=2048, inner=768, **changed):
    base = dict(zip(FIELDS["grouped"][1:5], (1 << 20, 2 << 20, 3 << 20, 4 << 20), strict=True))
    base |= dict(zip(FIELDS["grouped"][10:15], (n << 24 for n in range(1, 6)), strict=True))
    base |= {"dtype": BF16, "T": T, "E": E, "H": H, "I": inner, "processors": 132, "x_stride": H}
    base |= {"w13_stride": H, "w13_expert_stride": 2 * inner * H, "w2_stride": inner, "w2_expert_stride": inner * H}
    return base | {"scratch": 1 << 40, "scratch_bytes": 1 << 40} | changed


@pytest.mark.parametrize("M", [1, 8, 9, 33, 100, 256])
@pytest.mark.parametrize("N, K", [(4096, 4096), (70, 8192), (128, 512), (5, 64)])
def test_skinny_launches_what_python_launches(dense, M, N, K):
    arch, exported = dense
    launches = exported.launches(**product(M, N, K))
    tile = tiles.pick("skinny", M, 2, arch)
    plan = skinny.plan(tile, N, K, 2)
    file, launch = launches[0]
    rows = min(rows for rows in tiles.table("skinny", 2, arch) if rows >= M)
    assert file == f"skinny_m{rows}{'_split' if plan.splits > 1 else ''}.cubin"
    assert (launch["gx"], launch["gy"]) == (plan.programs, 1)
    assert (launch["w_ptr"], launch["x_ptr"]) == (2 << 20, 1 << 20)
    assert (launch["M"], launch["N"], launch["k_units"]) == (M, N, K // 8)
    assert (launch["splits"], launch["steps_per_split"]) == (plan.splits, plan.steps_per_split)
    assert (launch["w_stride"], launch["x_stride"]) == ((K + 64) // 8, (K + 8) // 8)
    if plan.splits == 1:
        assert len(launches) == 1
        assert (launch["out_ptr"], launch["out_stride"]) == (3 << 20, N + 1)
        return
    assert (launch["out_ptr"], launch["out_stride"]) == (4 << 20, N)
    assert exported.call(**product(M, N, K))[1] == plan.splits * M * N * 4
    (file, total), *rest = launches[1:]
    assert (file, rest) == ("skinny_sum.cubin", [])
    assert (total["gx"], total["gy"]) == (-(-N // skinny.SUM_BLOCK), M)
    assert (total["partial_ptr"], total["out_ptr"], total["out_stride"]) == (4 << 20, 3 << 20, N + 1)
    assert (total["M"], total["N"], total["splits"]) == (M, N, plan.splits)


@pytest.mark.parametrize("T, E", [(1, 32), (16, 32), (17, 32), (64, 32), (65, 32), (500, 32), (500, 2)])
def test_experts_launch_what_python_launches(experts, T, E):
    arch, exported = experts
    H, inner, size = 2048, 768, 2
    (gate_up, first), (down, second), (file, last) = exported.launches(**layer(T, E))
    ring_ptr = (1 << 40) + T * TOP_K * (H + inner) * size
    scratch = ring_ptr - (1 << 40)
    for kind, name, launch, N, K in (("gate_up", gate_up, first, inner, H), ("down", down, second, H, inner)):
        tile = tiles.pick(kind, T, size, arch)
        ring, halves = tile.block_m < T, 2 if kind == "gate_up" else 1
        groups = min(E, T * TOP_K)
        programs = grouped.programs_of(tile, groups * -(-N // tile.block_n), halves, size, ring, 132)
        assert name == (f"{kind}_ring.cubin" if ring else f"{kind}_m{tile.block_m}.cubin")
        assert (launch["gx"], launch["gy"], launch["groups"]) == (programs, 1, groups)
        assert (launch["N"], launch["k_units"], launch["out_stride"]) == (N, K // 8, N)
        assert (launch["w_stride"], launch["x_stride"]) == (K // 8, K // 8)
        assert launch["w_group_stride"] == halves * N * K // 8
        assert (launch["pairs_ptr"], launch["offsets_ptr"], launch["active_ptr"]) == (3 << 24, 4 << 24, 5 << 24)
        if ring:
            assert (launch["ring_ptr"], launch["ring_stride"]) == (ring_ptr, -(-K // 64) * 64 // 8)
            taken = programs * halves * tile.block_n * -(-K // 64) * 64 * size
            ring_ptr, scratch = ring_ptr + taken, scratch + taken
    hidden, pair_out = 1 << 40, (1 << 40) + T * TOP_K * inner * size
    assert (first["x_ptr"], first["w_ptr"], first["out_ptr"]) == (1 << 20, 2 << 20, hidden)
    assert (second["x_ptr"], second["w_ptr"], second["out_ptr"]) == (hidden, 3 << 20, pair_out)
    assert file == "combine.cubin"
    assert (last["gx"], last["gy"], last["H"], last["experts"]) == (T, -(-H // combine.BLOCK), H, E)
    assert (last["pair_out_ptr"], last["out_ptr"]) == (pair_out, 4 << 20)
    assert (last["ids_ptr"], last["topk_weights_ptr"]) == (1 << 24, 2 << 24)
    assert exported.call(**layer(T, E))[1] == scratch


REFUSED = {
    "dtype": ({"dtype": 2}, DTYPE),
    "w": ({"w": (2 << 20) + 8}, ALIGNMENT),
    "x": ({"x": (1 << 20) + 2}, ALIGNMENT),
    "out": ({"out": (3 << 20) + 4}, ALIGNMENT),
    "K": ({"K": 4095}, ALIGNMENT),
    "w_stride": ({"w_stride": 4100}, ALIGNMENT),
    "x_stride": ({"x_stride": 4100}, ALIGNMENT),
    "M": ({"M": 257}, SIZE),
    "N": ({"N": 1 << 31}, SIZE),
    "scratch": ({"N": 70, "K": 8192, "scratch_bytes": 0}, SCRATCH),
}


@pytest.mark.parametrize("changed, status", REFUSED.values(), ids=REFUSED)
def test_skinny_refuses_what_it_was_not_compiled_for(dense, changed, status):
    got, _, lines = dense[1].call(**product() | changed)
    assert got == status
    assert not [line for line in lines if line[0] == "launch"]


REFUSED_EXPERTS = {
    "dtype": ({"dtype": 3}, DTYPE),
    "w13": ({"w13": 8}, ALIGNMENT),
    "H": ({"H": 2047}, ALIGNMENT),
    "inner": ({"I": 767}, ALIGNMENT),
    "expert-stride": ({"w2_expert_stride": 4}, ALIGNMENT),
    "T": ({"T": 1 << 30}, SIZE),
    "T-beyond-64-bits": ({"T": 1 << 62}, SIZE),
    "rows-far-apart": ({"w13_stride": 1 << 24}, SIZE),
    "scratch": ({"scratch_bytes": 100}, SCRATCH),
}


@pytest.mark.parametrize("changed, status", REFUSED_EXPERTS.values(), ids=REFUSED_EXPERTS)
def test_experts_refuse_what_they_were_not_compiled_for(experts, changed, status):
    got, _, lines = experts[1].call(**layer() | changed)
    assert got == status
    assert not [line for line in lines if line[0] == "launch"]


def test_nothing_to_do_launches_nothing(dense, experts):
    assert dense[1].launches(**product(M=0)) == []
    assert experts[1].launches(**layer(T=0)) == []


@pytest.mark.parametrize("fail_at", [1, 2, 3, 40])
def test_a_failing_driver_is_told(dense, fail_at):
    status, _, lines = dense[1].call(fail_at=fail_at, **product())
    assert status == DRIVER
    assert len(lines) == fail_at


def test_the_driver_gets_the_cubins_their_symbols_and_their_shared_memory(dense):
    _, exported = dense
    _, _, lines = exported.call(**product())
    for number, entry in enumerate(exported.kernels):
        load, symbol, attribute = lines[3 * number : 3 * number + 3]
        assert load == ["load", str(number), str(fnv1a((exported.folder / entry["file"]).read_bytes()))]
        assert symbol == ["symbol", str(number), entry["symbol"]]
        assert attribute == ["attribute", str(number), "8", str(entry["shared_bytes"])]


def fnv1a(data: bytes) -> int:
    value = 14695981039346656037
    for byte in data:
        value = (value ^ byte) * 1099511628211 % 2**64
    return value


def test_the_manifest_names_what_ptx_takes(dense, experts):
    for _, exported in (dense, experts):
        assert json.loads((exported.folder / "manifest.json").read_text()) == exported.manifest
        for entry in exported.kernels:
            wide = [name.endswith(("_ptr", "_scratch")) for name in entry["arguments"]]
            assert [kind == "u64" for kind in entry["types"]] == wide


def test_what_is_shipped_names_no_folder_of_this_machine(dense, experts):
    for _, exported in (dense, experts):
        for path in exported.folder.glob("*.cubin"):
            assert str(Path(export.__file__).parent).encode() not in path.read_bytes()


def test_command(tmp_path, capsys):
    assert (
        export.main(
            ["--kernel", "grouped", "--dtype", "bf16", "--arch", "sm_80", "--out", str(tmp_path), "--top-k", "4"]
        )
        == 0
    )
    assert "7 cubins, manifest.json and C" in capsys.readouterr().out
    assert len(list(tmp_path.glob("*.cubin"))) == 7


def test_an_interpreting_process_says_that_it_cannot_compile(tmp_path):
    words = ["--kernel", "skinny", "--dtype", "bf16", "--arch", "sm_90", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "offload_kernels.export", *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(export.__file__).parents[1],
        env={"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 1
    assert "unset it and start again" in done.stderr
    assert not (tmp_path / "out").exists()
