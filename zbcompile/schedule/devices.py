"""Peak rates of devices, so that costs can be counted without having the device. This file needs no torch.

Figures are dense (no sparsity), per device, from the vendors' data sheets named in ``source``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zbcompile.errors import UsageError
from zbcompile.schedule.costs import Link

__all__ = ["DEVICES", "Device", "device_named"]

_TERA = 10**12
_GIGA = 10**9


_AT_RATE_OF = {"complex32": "float16", "complex64": "float32", "complex128": "float64", "bool": "float32"} | {
    f"{sign}int{bits}": "float32" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class Device:
    """The roofline of a device.

    Attributes
    ----------
    flops_per_second
        Peak FLOP/s by dtype name (``float32``, ``bfloat16``, ...), of the matrix units where there are any.
    bytes_per_second
        Memory bandwidth in bytes per second.
    memory_bytes
        Memory capacity in bytes.
    launch_ns
        Least time of every operator, in ns.
    link
        Connection to the next device (one direction).
    source
        Where the figures come from.
    element_ps
        Picoseconds per element of functions that neither bandwidth nor matrix rate bounds (``tanh``,
        ``native_dropout``): on one CPU core they are most of what a roofline misses.
    """

    name: str
    flops_per_second: Mapping[str, int]
    bytes_per_second: int
    memory_bytes: int
    launch_ns: int
    link: Link
    source: str
    element_ps: Mapping[str, int] = field(default_factory=dict)

    def peak(self, dtype: str) -> int:
        """Return the peak FLOP/s of a dtype.

        Integers and bools run at the float32 rate, complex numbers at that of their parts.

        Raises
        ------
        UsageError
            The device has no rate for the dtype.
        """
        rate = self.flops_per_second.get(dtype)
        if rate is None:
            rate = self.flops_per_second.get(_AT_RATE_OF.get(dtype, ""))
        if rate is None:
            raise UsageError(
                f"no peak rate of {self.name} for {dtype}",
                needed=", ".join(sorted(self.flops_per_second)),
                given=dtype,
                fix="give a Device with that rate",
            )
        return rate

    def roofline_ns(
        self, flops: int, num_bytes: int, dtype: str, function: str = "", elements: int = 0
    ) -> int:
        """Return max(compute, memory, elements of a slow function) + launch in ns, each rounded up.

        Parameters
        ----------
        flops, num_bytes
            Work of the operator, and bytes that it reads and writes.
        dtype
            Name of the dtype that it computes in.
        function, elements
            Name of the function and its number of elements, for `element_ps`.

        Raises
        ------
        UsageError
            The device has no rate for the dtype.

        Notes
        -----
        Source: Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009.
        """
        compute = -(-flops * _GIGA // self.peak(dtype)) if flops else 0
        memory = -(-num_bytes * _GIGA // self.bytes_per_second)
        slow = -(-elements * self.element_ps.get(function, 0) // 1000)
        return max(compute, memory, slow) + self.launch_ns


def _gpu(
    name: str,
    fp32: float,
    tf16: float,
    fp64: float,
    tb_s: float,
    gib: int,
    link_gb_s: int,
    source: str,
    tf8: float = 0,
) -> Device:
    half = int(tf16 * _TERA)
    rates = {
        "float32": int(fp32 * _TERA),
        "bfloat16": half,
        "float16": half,
        "float64": int(fp64 * _TERA),
    }
    if tf8:
        rates |= dict.fromkeys(_FLOAT8, int(tf8 * _TERA))
    link = Link(10_000, link_gb_s * _GIGA)
    return Device(name, rates, int(tb_s * _TERA), gib * 2**30, 5_000, link, source)


_CPU_ELEMENT_PS = {
    "tanh": 10_000,
    "gelu": 1_500,
    "silu": 1_500,
    "sigmoid": 1_500,
    "exp": 1_500,
    "erf": 3_000,
    "cos": 5_000,
    "sin": 5_000,
    "_softmax": 6_000,
    "native_dropout": 40_000,
    "rand": 13_000,
}

DEVICES: Mapping[str, Device] = {
    d.name: d
    for d in (
        _gpu("A100", 19.5, 312, 9.7, 2.039, 80, 300, "NVIDIA A100 80GB SXM data sheet"),
        _gpu("H100", 67, 989.4, 34, 3.35, 80, 450, "NVIDIA H100 SXM data sheet", 1978.9),
        _gpu("H200", 67, 989.4, 34, 4.8, 141, 450, "NVIDIA H200 SXM data sheet"),
        _gpu("B200", 75, 2250, 37, 7.7, 180, 900, "NVIDIA HGX B200 data sheet, per GPU"),
        _gpu(
            "MI300X",
            163.4,
            1307.4,
            81.7,
            5.3,
            192,
            64,
            "AMD Instinct MI300X data sheet; one Infinity Fabric link",
        ),
        Device(
            "CPU",
            {
                "float32": 100 * _GIGA,
                **dict.fromkeys(("bfloat16", "float16", "float64", *_FLOAT8), 50 * _GIGA),
            },
            20 * _GIGA,
            16 * 2**30,
            2_000,
            Link(50_000, 2 * _GIGA),
            "one core with 512-bit vector units, nominal; `measure_cpu` replaces it by measured rates",
            _CPU_ELEMENT_PS,
        ),
    )
}


def device_named(name: str) -> Device:
    """Return a device of `DEVICES` by its name, in any letter case.

    Raises
    ------
    UsageError
        No device has that name; the message lists the names.
    """
    for known, device in DEVICES.items():
        if known.lower() == name.lower():
            return device
    raise UsageError(f"unknown device {name!r}", needed=", ".join(DEVICES))
