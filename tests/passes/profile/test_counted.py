"""Counted costs against torch's own FLOP counter and against sizes worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from tests.support.kinds_zoo import KINDS, SIZE
from tests.support.model_zoo import PLAIN, TRANSFORMERS
from zbcompile.compiler.stages import build_stages
from zbcompile.errors import UsageError
from zbcompile.passes.aliasing import StorageGroups
from zbcompile.passes.capture.capture import capture
from zbcompile.passes.op_costs import OpCount, count_graph, graph_ns, nominal_device, op_ns
from zbcompile.passes.partition.call_costs import call_counts
from zbcompile.passes.profile.calibration import calibration_report
from zbcompile.passes.profile.counted import counted_profile
from zbcompile.passes.profile.cpu_rates import measure_cpu
from zbcompile.passes.profile.measure import measure
from zbcompile.planner.plan import plan
from zbcompile.schedule.costs import Link
from zbcompile.schedule.devices import DEVICES, Device, device_named
from zbcompile.schedule.ir import Placement
from zbcompile.schedule.problem import Problem


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


@pytest.mark.parametrize(
    "name", ["CNN with BatchNorm", "U-Net", "LoRA", "first layers frozen", "tied table, frozen", "gpt2", "t5"]
)
def test_the_cut_counts_the_products_of_a_training_step(name: str) -> None:
    """Forward and backward, call by call before anything is differentiated, against torch's counter."""
    case = {**PLAIN, **TRANSFORMERS}[name]
    torch.manual_seed(0)
    model = case.build().train(case.train)
    args, kwargs, target = case.batch()
    captured = capture(model, args, kwargs, target=target, loss_fn=case.loss)
    counts = call_counts(captured, StorageGroups(captured.module.graph)).values()
    operators = [one for count in counts for one in (*count.forward, *count.full_backward)]
    with FlopCounterMode(display=False) as counter:
        output = model(*args, **kwargs)
        loss = output.loss if case.loss is None else case.loss(output, target)
        loss.backward()
    products = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    wanted = sum(flops for op, flops in products.items() if "mm" in op or "conv" in op)
    assert wanted > 0
    assert sum(one.flops for one in operators if "mm" in one.target or "conv" in one.target) == wanted


def test_what_stands_for_a_device_has_a_rate_for_every_dtype() -> None:
    for device in (nominal_device(torch.device("cpu")), nominal_device(torch.device("cuda"))):
        for dtype in (torch.complex128, torch.uint16, torch.bool, torch.float8_e5m2, torch.float8_e8m0fnu):
            assert device.peak(str(dtype).removeprefix("torch.")) > 0


def test_more_work_takes_no_less_time() -> None:
    for device in DEVICES.values():
        for dtype in ("float32", "bfloat16"):
            times = [
                op_ns(OpCount("", n * n * n, n * n, dtype, "tanh", n), device) for n in range(0, 9000, 300)
            ]
            assert times == sorted(times)
            assert times[0] == device.launch_ns < times[-1]


def test_attention_counts_two_products() -> None:
    q = torch.ones(2, 3, 64, 8)
    module = _graph(lambda a: torch.nn.functional.scaled_dot_product_attention(a, a, a), q)
    flops = sum(c.flops for c in count_graph(module) if "scaled_dot" in c.target)
    assert flops == 2 * 2 * (2 * 3 * 64 * 64 * 8)


def test_roofline_takes_the_slower_of_compute_and_memory() -> None:
    device = DEVICES["H100"]
    big = _graph(torch.mm, torch.ones(4096, 4096), torch.ones(4096, 4096))
    assert graph_ns(big, device) == -(-2 * 4096**3 * 10**9 // (67 * 10**12)) + device.launch_ns
    add = _graph(torch.add, torch.ones(1 << 20), torch.ones(1 << 20))
    assert graph_ns(add, device) == -(-3 * 4 * (1 << 20) * 10**9 // (3_350 * 10**9)) + device.launch_ns


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


def test_causal_attention_counts_half_the_scores() -> None:
    q = torch.ones(2, 3, 64, 8)

    attention = torch.nn.functional.scaled_dot_product_attention
    full, half = (
        sum(c.flops for c in count_graph(_graph(work, q)) if "scaled" in c.target)
        for work in (lambda a: attention(a, a, a), lambda a: attention(a, a, a, is_causal=True))
    )
    assert full == 2 * half > 0


def test_slow_functions_bound_an_operator_where_the_device_says_so() -> None:
    module = _graph(lambda x: (x.tanh(), torch.nn.functional.gelu(x, approximate="tanh")), torch.ones(1000))
    first, second = count_graph(module)
    assert (first.function, first.elements) == (second.function, second.elements) == ("tanh", 1000)
    slow = replace(DEVICES["CPU"], element_ps={"tanh": 7_000})
    assert graph_ns(module, slow) == 2 * (7_000 + slow.launch_ns)
    assert DEVICES["H100"].element_ps == {}


def _mlp(layers: int = 4, width: int = 16):
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh()) for _ in range(layers))
    )
    model[0][0].weight.requires_grad_(False)
    return model, (torch.randn(8, width),), torch.randn(8, width)


def _stages(model, args, target):
    return build_stages(
        model, 4, args, target=target, loss_fn=torch.nn.functional.mse_loss, split_points=["1", "2", "3"]
    )


def test_a_counted_profile_has_exact_bytes_and_rooflines_of_every_graph() -> None:
    model, args, target = _mlp()
    built = _stages(model, args, target)
    device = DEVICES["A100"]
    profile = counted_profile(built.stages, "A100")
    weight, bias, value = 16 * 16 * 4, 16 * 4, 8 * 16 * 4
    assert [s.static_bytes for s in profile.stages] == [
        weight + 4 * bias,  # the weight is frozen: no gradient, no optimizer state
        *[4 * (weight + bias)] * 3,
    ]
    assert [(e.source, e.target, e.forward_bytes, e.backward_bytes) for e in profile.edges] == [
        (s, s + 1, value, value) for s in range(3)
    ]
    for cost, stage in zip(profile.stages, built.stages, strict=True):
        assert cost.forward_ns == graph_ns(stage.graphs.forward, device)
        assert cost.backward_input_ns == graph_ns(stage.graphs.backward_input, device)
        assert cost.full_backward_ns == graph_ns(stage.graphs.full_backward, device)
        assert (cost.saved_bytes, cost.saved_for_weight_bytes) == (
            stage.saved_bytes,
            stage.saved_for_weight_bytes,
        )
    assert profile.link == device.link
    assert "A100" in profile.source
    own = counted_profile(built.stages, device, Link(7, 10), optimizer_bytes=12)
    assert own.link == Link(7, 10)
    assert own.stages[1].static_bytes == 2 * (weight + bias) + 12 * (16 * 16 + 16)
    assert own.stages[1].gradient_bytes == weight + bias


def test_counted_bytes_equal_those_of_a_measured_profile() -> None:
    model, args, target = _mlp()
    built = _stages(model, args, target)
    batch = built.flat_inputs(args, None, target)
    measured = measure(built.stages, built.captured.state, batch, repeats=1)
    counted = counted_profile(built.stages, "cpu")
    assert counted.edges == measured.edges
    for one, other in zip(counted.stages, measured.stages, strict=True):
        assert (one.saved_bytes, one.saved_for_weight_bytes, one.static_bytes) == (
            other.saved_bytes,
            other.saved_for_weight_bytes,
            other.static_bytes,
        )
        assert one.gradient_bytes == other.gradient_bytes


def test_stages_are_cut_for_the_device_that_is_planned_for() -> None:
    """No cut before a layer gives a shorter step than the one that is chosen; for a CPU another one is."""
    with torch.device("meta"):
        layers = [nn.Linear(2048, 2048) for _ in range(4)] + [nn.SiLU() for _ in range(40)]
        model = nn.Sequential(*layers, nn.Linear(2048, 2048)).bfloat16()
        x = torch.empty(2048, 2048, dtype=torch.bfloat16)
    device = device_named("H100")

    def span(planned_for: Device | None, at: str | None = None) -> int:
        staged = build_stages(
            model,
            2,
            (x,),
            target=x,
            loss_fn=nn.functional.mse_loss,
            split_points=at and [at],
            planned_for=planned_for,
            num_microbatches=8,
        )
        profile = counted_profile(staged.stages, device)
        return plan(Problem(profile, Placement((0, 1)), 8), time_limit_s=1.0).certificate.value_ns

    chosen = span(device)
    assert chosen <= min(span(device, str(layer)) for layer in (20, 21, 22))
    assert chosen < 0.8 * span(None)


def test_calibration_names_every_stage_and_kind_that_does_work() -> None:
    model, args, target = _mlp()
    built = _stages(model, args, target)
    batch = built.flat_inputs(args, None, target)
    measured = measure(built.stages, built.captured.state, batch, repeats=1)
    report = calibration_report(built.stages, built.captured.state, batch, DEVICES["CPU"], measured=measured)
    kinds = {(r.stage, r.kind) for r in report.rows}
    assert kinds >= {(s, k) for s in (1, 2, 3) for k in ("F", "B", "W", "BW")}
    assert (0, "B") not in kinds  # the first stage's B is empty
    forward = next(r for r in report.rows if (r.stage, r.kind) == (2, "F"))
    assert forward.counted_ns == graph_ns(built.stages[2].graphs.forward, DEVICES["CPU"])
    assert forward.measured_ns == measured.stages[2].forward_ns
    assert report.mean_error >= 0 <= report.relative_error
    assert str(report).count("\n") == len(report.rows) + 1


def test_a_counted_profile_of_a_model_without_weights_is_that_of_the_model() -> None:
    model, args, target = _mlp()
    with torch.device("meta"):
        bare, _, _ = _mlp()
    real = counted_profile(_stages(model, args, target).stages, "H100")
    meta = counted_profile(_stages(bare, args, target).stages, "H100")
    assert meta == real


def test_sizes_that_depend_on_data_count_at_their_upper_bound() -> None:
    build, batch = KINDS["experts by torch.where"]
    args, kwargs = batch()
    built = build_stages(build(), 2, args, kwargs, loss_fn=lambda y, _: y.pow(2).mean())
    profile = counted_profile(built.stages, "CPU")
    assert profile.source.endswith("sizes that depend on data at their upper bound")
    counts = [c for stage in built.stages for c in count_graph(stage.graphs.forward) if "addmm" in c.target]
    assert [c.flops for c in counts] == [2 * 6 * SIZE * SIZE] * 3
