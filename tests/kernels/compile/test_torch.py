"""`linear` as torch sees it: on CPU tensors without a schedule, as an operator, compiled; and what it refuses."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from offload_kernels import check_weight, choose_schedule, linear
from offload_kernels.checks import check_locked
from tests.kernels.yardstick import assert_accurate


class Operators(TorchDispatchMode):
    """Notes every operator that is called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **kwargs or {})


@pytest.fixture
def tensors():
    return torch.randn(2, 3, 40), torch.randn(70, 40), torch.randn(70)


def test_without_a_schedule_it_is_torch(tensors):
    assert torch.equal(linear(*tensors), F.linear(*tensors))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_dispatch_mode_sees_one_operator(tensors, mode):
    with mode(), Operators() as seen:
        y = linear(*tensors)
        linear(*tensors, schedule="staged")
        linear(*tensors, out=torch.empty(2, 3, 70))
    assert seen.names[:1] == ["offload::linear"]
    assert [name for name in seen.names if name.startswith("offload")] == [
        *["offload::linear"] * 2,
        "offload::linear_out",
    ]
    assert not {name for name in seen.names if "mm" in name or name == "aten::linear"}
    assert torch.equal(y, F.linear(*tensors))


def test_meta_tensors(tensors):
    x, weight, bias = (t.to("meta", torch.bfloat16) for t in tensors)
    y = linear(x, weight, bias)
    assert (y.shape, y.dtype, y.device.type) == ((2, 3, 70), torch.bfloat16, "meta")


@pytest.mark.parametrize("schedule", [None, "staged"])
def test_staged_and_out(tensors, schedule):
    x, weight, bias = tensors
    out = torch.full((2, 3, 70), float("nan"))
    assert linear(x, weight, bias, schedule=schedule, out=out) is out
    assert_accurate(out, x, weight, bias)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("schedule", [None, "staged"])
def test_opcheck(tensors, bias, schedule):
    x, weight, b = tensors
    arguments = (x, weight, b if bias else None, schedule)
    torch.library.opcheck(torch.ops.offload.linear, arguments)
    torch.library.opcheck(torch.ops.offload.linear_out, arguments, {"out": torch.empty(2, 3, 70)})


def test_compiles_without_a_graph_break(tensors):
    def layer(x, weight, bias):
        return torch.relu(linear(x, weight, bias)) + linear(x, weight, schedule="staged")

    with torch.no_grad():
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
        for rows in (3, 5):
            x = torch.randn(rows, 40)
            torch.testing.assert_close(compiled(x, *tensors[1:]), layer(x, *tensors[1:]))


def test_compiles_with_out(tensors):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(x, weight, bias, out):
        return linear(x, weight, bias, out=out) + 1

    out = torch.full((2, 3, 70), float("nan"))
    with torch.no_grad():
        y = layer(*tensors, out)
    torch.testing.assert_close(y, F.linear(*tensors) + 1)
    torch.testing.assert_close(out, F.linear(*tensors))


def test_needs_neither_triton_nor_a_gpu():
    code = (
        "import sys; sys.modules['triton'] = None; import offload_kernels as k, torch; "
        "assert 'offload_kernels.dense' not in sys.modules; "
        "assert k.linear(torch.ones(1, 4), torch.ones(2, 4)).tolist() == [[4, 4]]; "
        "import offload_kernels.dense, offload_kernels.schedule, offload_kernels.memory; assert callable(k.linear); "
        "k.choose_schedule(1, 2, 3, torch.float32); assert k.is_host_resident(torch.ones(1)); "
        "k.linear(torch.ones(1, 4), torch.ones(2, 4), schedule='staged')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": "kernels", "OMP_NUM_THREADS": "1"})


class TestRefusals:
    """Every mistake of a caller is told with its values and the remedy."""

    @pytest.fixture(params=[None, "staged"], ids=["fast-path", "operator"])
    def call(self, request):
        return lambda *tensors, **options: linear(*tensors, **{"schedule": request.param} | options)

    def test_columns(self, call):
        with pytest.raises(
            ValueError, match=r"x \(3, 40\) and weight \(40, 70\) \(N, K\): the last sizes must be equal"
        ):
            call(torch.randn(3, 40), torch.randn(40, 70))

    def test_x_without_dimensions(self, call):
        with pytest.raises(ValueError, match=r"x \(\) and weight \(70, 40\)"):
            call(torch.tensor(1.0), torch.randn(70, 40))

    def test_dtypes(self, call):
        with pytest.raises(ValueError, match=r"x is torch.bfloat16 and weight torch.float32: convert one of them"):
            call(torch.randn(3, 40).bfloat16(), torch.randn(70, 40))

    def test_other_dtype(self, call):
        with pytest.raises(ValueError, match="x is torch.float64: the kernels take float32, float16 and bfloat16"):
            call(torch.randn(3, 40).double(), torch.randn(70, 40).double())

    def test_weight_of_one_dimension(self, call):
        with pytest.raises(ValueError, match=r"weight has the shape \(40,\): pass \(N, K\)"):
            call(torch.randn(3, 40), torch.randn(40))

    def test_weight_without_unit_stride(self, call):
        with pytest.raises(ValueError, match=r"has strides \(1, 70\): K needs unit stride, weight.contiguous\(\)"):
            call(torch.randn(3, 40), torch.randn(40, 70).t())

    def test_bias(self, call):
        with pytest.raises(
            ValueError, match=r"bias is \(71,\) torch.float32 on cpu: \(70,\) torch.float32 on cpu is needed"
        ):
            call(torch.randn(3, 40), torch.randn(70, 40), torch.randn(71))

    def test_devices(self, call):
        with pytest.raises(ValueError, match="x is on cpu and weight on meta: move it beside x"):
            call(torch.randn(3, 40), torch.empty(70, 40, device="meta"))

    @pytest.mark.parametrize("which", [0, 1, 2], ids=["x", "weight", "bias"])
    def test_grad(self, call, which):
        tensors = [torch.randn(3, 40), torch.randn(70, 40), torch.randn(70)]
        tensors[which].requires_grad_()
        with pytest.raises(
            ValueError, match="requires grad, and the kernels have no backward: call under torch.inference"
        ):
            call(*tensors)
        with torch.no_grad():
            assert call(*tensors).shape == (3, 70)

    def test_pageable_weight_on_the_gpu(self):
        with pytest.raises(
            ValueError, match=r"weight \(70, 40\) torch.float32 is in pageable host memory.*page_lock\(weight\)"
        ):
            check_locked(torch.randn(70, 40))
        check_locked(torch.empty(0, 40))  # nothing there to read

    def test_out(self, call):
        x, weight = torch.randn(3, 40), torch.randn(70, 40)
        with pytest.raises(
            ValueError, match=r"out is \(3, 71\) torch.float32 on cpu, the product \(3, 70\) torch.float32"
        ):
            call(x, weight, out=torch.empty(3, 71))

    def test_out_without_contiguous_rows(self):
        with pytest.raises(ValueError, match=r"out \(3, 70\) with strides \(1, 3\) is no matrix with contiguous rows"):
            linear(torch.randn(3, 40), torch.randn(70, 40), schedule="staged", out=torch.empty(70, 3).t())

    @pytest.mark.parametrize("schedule", [None, "staged"])
    def test_out_whose_rows_overlap(self, schedule):
        out = torch.empty(1, 70).expand(3, 70)
        with pytest.raises(ValueError, match=r"out \(3, 70\) with strides \(0, 1\) has rows that overlap"):
            linear(torch.randn(3, 40), torch.randn(70, 40), schedule=schedule, out=out)

    def test_out_that_requires_grad(self, call):
        out = torch.empty(3, 70, requires_grad=True)
        with pytest.raises(ValueError, match="requires grad, and the kernels have no backward"):
            call(torch.randn(3, 40), torch.randn(70, 40), out=out)
        with torch.no_grad():
            assert call(torch.randn(3, 40), torch.randn(70, 40), out=out) is out

    def test_weight_rows_too_far_apart(self, call):
        weight = torch.empty(3, 1 << 25, dtype=torch.bfloat16)[:, :40]
        with pytest.raises(
            ValueError, match=r"begin 33554432 elements apart, the kernels reach 16777215: .*contiguous"
        ):
            call(torch.randn(3, 40).bfloat16(), weight)

    def test_schedule(self):
        with pytest.raises(ValueError, match="schedule 'fast' is unknown: use one of skinny, wide, staged, or None"):
            linear(torch.randn(3, 40), torch.randn(70, 40), schedule="fast")

    @pytest.mark.parametrize("schedule", ["skinny", "wide"])
    def test_kernels_on_the_cpu_outside_of_the_interpreter(self, schedule):
        with pytest.raises(RuntimeError, match="runs in Triton's interpreter: set TRITON_INTERPRET=1 before triton is"):
            linear(torch.randn(3, 40), torch.randn(70, 40), schedule=schedule)


class Rates:
    def __init__(self, sm, ce):
        self.sm_bytes_per_s, self.ce_bytes_per_s = sm, ce


@pytest.mark.parametrize(
    "shape, rates, expected",
    [
        ((1, 4096, 4096), None, "skinny"),
        ((256, 4096, 4096), None, "skinny"),
        ((257, 4096, 4096), None, "wide"),
        ((2048, 4096, 4096), None, "wide"),
        ((2049, 4096, 4096), None, "staged"),
        ((2049, 256, 4096), None, "wide"),
        ((1, 4096, 4096), Rates(37e9, 55e9), "staged"),
        ((1, 4096, 1024), Rates(37e9, 55e9), "skinny"),
        ((300, 4096, 4096), Rates(55e9, 55e9), "wide"),
    ],
)
def test_choice_of_schedule(shape, rates, expected):
    assert choose_schedule(*shape, torch.bfloat16, rates) == expected


class TestCheckWeight:
    """Layouts that are slow are told, with the remedy."""

    def test_aligned(self):
        weight = torch.empty(70 * 64 + 64, dtype=torch.bfloat16)
        weight = weight[-weight.data_ptr() % 128 // 2 :][: 70 * 64].view(70, 64)
        assert (check := check_weight(weight)).load_bytes == 16 and check.full_lines and check.remedy is None

    @pytest.mark.parametrize("columns, load_bytes", [(65, 2), (66, 4), (68, 8), (72, 16)])
    def test_rows_off_the_line(self, columns, load_bytes):
        check = check_weight(torch.empty(70, columns, dtype=torch.bfloat16))
        assert check.load_bytes == load_bytes and not check.full_lines
        assert check.remedy == f"begin each row on 128 bytes: allocate rows of 128 elements and use [..., :{columns}]"

    def test_base_off_the_line(self):
        weight = torch.empty(70 * 64 + 65, dtype=torch.bfloat16)
        weight = weight[-weight.data_ptr() % 128 // 2 + 1 :][: 70 * 64].view(70, 64)
        assert check_weight(weight).load_bytes == 2

    def test_experts(self):
        assert check_weight(torch.empty(3, 5, 64)).load_bytes == 16

    @pytest.mark.parametrize("weight", [torch.empty(4), torch.empty(4, 4).t()[1:], torch.empty(4, 4).double()])
    def test_refused(self, weight):
        with pytest.raises(ValueError, match=r"the kernels take \(N, K\) or \(E, N, K\)"):
            check_weight(weight)
