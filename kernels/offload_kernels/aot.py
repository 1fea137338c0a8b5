"""Compile a kernel ahead of time for a GPU that need not be here."""

from dataclasses import dataclass
from types import ModuleType

from offload_kernels.tiles import Specialisation

ARCHES = (80, 89, 90, 100, 120)


@dataclass(frozen=True)
class Binary:
    """A kernel as machine code.

    Args:
        symbol: Name of the kernel in the cubin.
        cubin: The ELF image that ``cuModuleLoadData`` takes.
        ptx: The text it was assembled from.
        ttgir: The compiler's last form with layouts of tensors in it.
        arguments: Names of the arguments that remain at a launch, in order. Two 64-bit scratch pointers follow them, 0
            here.
        threads: Threads of one program.
        shared_bytes: Dynamic shared memory of one program.
    """

    symbol: str
    cubin: bytes
    ptx: str
    ttgir: str
    arguments: tuple[str, ...]
    threads: int
    shared_bytes: int


def build(module: ModuleType, spec: Specialisation, arch: int, *, line_info: bool = True) -> Binary:
    """Compile ``spec`` of a kernel module.

    Args:
        module: The module that has the kernel (``offload_kernels.skinny``).
        spec: What its ``specialise`` returned.
        arch: Compute capability as an integer (90 for sm_90); no such GPU is needed.
        line_info: The code names its source lines, by the path they have on this machine.

    Raises:
        RuntimeError: This process interprets kernels (``TRITON_INTERPRET=1``), so it cannot compile them, or the kernel
            asks for scratch memory, which a launch from outside Triton does not provide.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if triton.knobs.runtime.interpret:
        raise RuntimeError("a process with TRITON_INTERPRET=1 cannot compile kernels: unset it and start again")
    source = ASTSource(getattr(module, spec.kernel), spec.signature, spec.constexprs, spec.attrs())
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = not line_info
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    meta = compiled.metadata
    if meta.global_scratch_size or meta.profile_scratch_size:
        raise RuntimeError(
            f"{meta.name} asks for {meta.global_scratch_size} + {meta.profile_scratch_size} bytes of scratch memory"
        )
    arguments = tuple(name for name, kind in spec.signature.items() if kind != "constexpr")
    return Binary(
        meta.name,
        compiled.asm["cubin"],
        compiled.asm["ptx"],
        compiled.asm["ttgir"],
        arguments,
        32 * meta.num_warps,
        meta.shared,
    )
