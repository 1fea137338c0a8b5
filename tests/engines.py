"""What tests of the engine share: a device that counts what crosses to Python, and configurations of every kind."""

from offload.cpu import CpuDevice


class CountingDevice(CpuDevice):
    """A CPU that counts what crosses, and may have less memory than it has."""

    def __init__(self, free_bytes=None):
        super().__init__()
        self.reads = 0
        self.writes = 0
        self.marks = []
        self.free_bytes = free_bytes

    def to_host(self, tensor):
        self.reads += 1
        return super().to_host(tensor)

    def from_host(self, values, dtype=None):
        self.writes += 1
        return super().from_host(values, *([dtype] if dtype else []))

    def mark_step(self, name):
        self.marks.append(name)

    def device_memory(self):
        memory = super().device_memory()
        return memory if self.free_bytes is None else type(memory)(self.free_bytes, memory.total_bytes)


def uva(gb, *selectors):
    return {"uva": {"cpu_offload_gb": gb, "cpu_offload_params": sorted(selectors)}}


def prefetch(group, count, step, *selectors):
    fields = {"offload_group_size": group, "offload_num_in_group": count, "offload_prefetch_step": step}
    return {"prefetch": {**fields, "offload_params": sorted(selectors)}}


# One byte, part of a layer, everything; each kind of parameter alone; rings with and without refills, unlike layers,
# layers in a row, a group that is longer than half of the model.
CONFIGS = {
    "uva-one-byte": uva(1e-9),
    "uva-half": uva(1.3e-5),
    "uva-all": uva(1),
    "uva-mlp": uva(1, "mlp"),
    "uva-norms": uva(1, "input_layernorm", "post_attention_layernorm"),
    "uva-qkv-and-down": uva(1, "self_attn.qkv_proj", "down_proj"),
    "uva-two-layers": uva(1, "layers.1", "model.layers.4"),
    "prefetch-every-second": prefetch(2, 1, 1),
    "prefetch-all-step-1": prefetch(1, 1, 1),
    "prefetch-all-step-4": prefetch(1, 1, 4),
    "prefetch-two-of-three": prefetch(3, 2, 2),
    "prefetch-odd-ring": prefetch(2, 1, 2),
    "prefetch-one-owner": prefetch(4, 1, 3),
    "prefetch-mlp": prefetch(2, 1, 2, "mlp"),
    "prefetch-norm-and-o": prefetch(1, 1, 2, "input_layernorm", "o_proj"),
}
