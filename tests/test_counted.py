"""Counted costs against torch's own FLOP counter and against sizes worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from zbcompile.devices import DEVICES, device_named
from zbcompile.errors import UsageError
from zbcompile.passes.counted import count_graph, counted_ns, measure_cpu


def _graph(fn, *args):
    return make_fx(fn, tracing_mode="fake")(*args)


def test_a_product_counts_its_flops_and_bytes() -> None:
    module = _graph(torch.mm, torch.ones(64, 32), torch.ones(32, 16))
    (count,) = count_graph(module)
    assert (count.flops, count.dtype) == (2 * 64 * 32 * 16, "float32")
    assert count.num_bytes == 4 * (64 * 32 + 32 * 16 + 64 * 16)


def test_views_are_free_and_expanded_dimensions_stored_once() -> None:
    module = _graph(lambda x: (x.view(-1).expand(5, 8) + 1).t(), torch.ones(2, 4))
    (count,) = count_graph(module)
    assert count.num_bytes == 4 * (8 + 40)


def test_matrix_flops_equal_those_of_torchs_counter() -> None:
    def work(x, w, q):
        y = torch.nn.functional.conv2d(q, torch.ones(4, 3, 3, 3))
        return torch.addmm(w[0], x, w).relu() @ w, y

    args = (torch.ones(8, 16), torch.ones(16, 16), torch.ones(2, 3, 8, 8))
    with FlopCounterMode(display=False) as counter:
        work(*args)
    counts = count_graph(_graph(work, *args))
    matrix = [c for c in counts if any(n in c.target for n in ("mm", "conv"))]
    assert sum(c.flops for c in matrix) == counter.get_total_flops()


def test_attention_counts_two_products() -> None:
    q = torch.ones(2, 3, 64, 8)
    module = _graph(lambda a: torch.nn.functional.scaled_dot_product_attention(a, a, a), q)
    flops = sum(c.flops for c in count_graph(module) if "scaled_dot" in c.target)
    assert flops == 2 * 2 * (2 * 3 * 64 * 64 * 8)


def test_roofline_takes_the_slower_of_compute_and_memory() -> None:
    device = DEVICES["H100"]
    big = _graph(torch.mm, torch.ones(4096, 4096), torch.ones(4096, 4096))
    assert counted_ns(big, device) == -(-2 * 4096**3 * 10**9 // (67 * 10**12)) + device.launch_ns
    add = _graph(torch.add, torch.ones(1 << 20), torch.ones(1 << 20))
    assert counted_ns(add, device) == -(-3 * 4 * (1 << 20) * 10**9 // (3_350 * 10**9)) + device.launch_ns


def test_names_and_unknown_rates() -> None:
    assert device_named("mi300x") is DEVICES["MI300X"]
    with pytest.raises(UsageError, match="unknown device"):
        device_named("abacus")
    with pytest.raises(UsageError, match="no peak rate"):
        DEVICES["A100"].peak("float8_e4m3fn")


def test_measured_cpu_has_rates_of_its_own() -> None:
    device = measure_cpu(repeats=3)
    assert device.flops_per_second["float32"] > 10**9
    assert device.bytes_per_second > 10**8
    assert "measured" in device.source
