"""A profile with small round numbers, so that times can be computed by hand: one byte or FLOP takes picoseconds."""

from dataclasses import replace

import pytest

from offload.virtual import Profile, load_profile

PS = 1e-12
PER_PS = 10**12


@pytest.fixture(scope="session")
def toy():
    """Make a profile: kernel loads 1 byte/ps, copies 2, device memory 10, 1 FLOP/ps; launch 5 ps, copy 3, issue 1."""

    def make(**numbers) -> Profile:
        base = replace(
            load_profile("h200-pcie5"),
            name="toy",
            sm_bytes_per_s=1 * PER_PS,
            ce_bytes_per_s=2 * PER_PS,
            hbm_bytes_per_s=10 * PER_PS,
            half_flops_per_s=1 * PER_PS,
            single_flops_per_s=1 * PER_PS,
            kernel_s=5 * PS,
            copy_s=3 * PS,
            issue_s=1 * PS,
            graph_issue_s=2 * PS,
        )
        return replace(base, **numbers)

    return make
