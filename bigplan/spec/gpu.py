"""A GPU as data, with the efficiencies that its kernels reach; GPU types are shipped by name."""

from __future__ import annotations

from math import inf
from statistics import NormalDist
from typing import Annotated, Literal

from pydantic import Field, model_validator

from bigplan.errors import InputError
from bigplan.spec.files import shipped
from bigplan.spec.files.document import LONGEST_NAME
from bigplan.spec.part import MachinePart, or_name
from bigplan.units import Bandwidth, Bytes, PositiveFlops, RankRate, Seconds

# Attention kernels: FlashAttention's three versions, cuDNN's (which Transformer Engine uses), and
# torch's scaled_dot_product_attention where it is none of these.
FlashKernel = Literal["flash1", "flash2", "flash3", "cudnn", "sdpa", "alibi"]
Peaked = Literal["bf16", "fp16", "fp32", "tf32", "fp8", "fp4"]
Divisor = Literal["by_4", "by_2", "by_1"]
PartReached = Annotated[float, Field(gt=0)]  # share of a nominal peak; CPU devices exceed theirs
HalfLength = Annotated[float, Field(ge=0)]  # tokens
GPUS = shipped.PACKAGE / "hardware"


class Gpu(MachinePart):
    """One device that computes."""

    name: str = Field(max_length=LONGEST_NAME)
    device: Literal["cuda", "rocm", "cpu"]
    """cuda; rocm for AMD's, which are planned for and never ran; or cpu for a part of the host's
    cores and memory that stands in for a GPU"""
    memory: Bytes = Field(gt=0)
    """usable device memory, such as 80 GiB"""
    multiprocessors: int = Field(gt=0, le=10**5)
    """streaming multiprocessors (cores, on a CPU): a GEMM's tiles fill them in waves"""
    peak_flops: dict[Peaked, PositiveFlops] = Field(min_length=1)
    """dense peak of each precision, such as {bf16: 989 TFLOP/s}"""
    memory_bandwidth: Bandwidth = Field(gt=0)
    """nominal, such as 3.35 TB/s"""
    gemm_efficiency: float = Field(gt=0, le=1)
    """fraction of the peak that a large GEMM reaches"""
    gemm_half_k: float = Field(ge=0)
    """inner dimension K0 in the factor K / (K + K0) of a GEMM's efficiency"""
    gemm_power_limit: PartReached | None = None
    """fraction of the 16-bit peak at which the largest products run one after the other: the clock
    falls until they take no more power than the GPU may; absent: they take less"""
    gemm_overlap: float = Field(default=1, ge=1)
    """exponent p with which a GEMM's arithmetic and traffic make its seconds, as (a^p + t^p)^(1/p):
    1 where they add up; larger where tiles on a multiprocessor load and store beside each other's
    arithmetic"""
    gemm_efficiencies: dict[Peaked, PartReached] | None = None
    """where a precision reaches another fraction of its peak; absent: gemm_efficiency for all"""
    misaligned_batches: dict[Divisor, PartReached] | None = Field(default=None, min_length=3)
    """the part of its rate that a batched product in 16 bits keeps where its rows' lengths are no
    multiples of 8, but of 4, 2 or 1; absent: it runs at the peak of fp32"""
    grouped_products: bool = False
    """whether one kernel multiplies rows by the matrices of different experts, each by one, without
    the host knowing which; false: the host waits for their numbers, and launches a kernel each"""
    grouped_eight_bits: bool = False
    """whether such a kernel is there for products in fp8, in which experts do not run without"""
    narrow_values: bool = False
    """whether torch has a flash kernel in 16 bits for values of fewer columns than keys, 128 beside
    192; false: values are padded"""
    memory_efficiency: float = Field(gt=0, le=1)
    """fraction of the nominal memory bandwidth that streaming kernels reach"""
    attention_forward_efficiency: dict[FlashKernel, PartReached] = Field(min_length=1)
    """by implementation of flash attention: fraction of the 16-bit peak (causal FLOPs counted)"""
    attention_backward_efficiency: dict[FlashKernel, PartReached] = Field(min_length=1)
    """by implementation: fraction of the 16-bit peak (2.5 x the forward's FLOPs)"""
    attention_forward_half_length: dict[FlashKernel, HalfLength] | None = None
    """by implementation: tokens h in the factor s / (s + h) of its efficiency; absent: h is 0"""
    attention_backward_half_length: dict[FlashKernel, HalfLength] | None = None
    """by implementation: the same of the backward"""
    launch_overhead: Seconds = Field(ge=0)
    """time per kernel that no work hides, such as 4 us"""
    operator_overhead: Seconds = Field(default=75e-6, ge=0)
    """host time of an operator of a layer in the native runtime: Python, autograd, a launch"""
    kernel_overhead: Seconds = Field(default=100e-6, ge=0)
    """host time that an operator takes besides where it is a fused kernel, launched from Python"""
    kernel_start: Seconds = Field(default=1.5e-6, ge=0)
    """time of the GPU between the end of a kernel and the first instruction of the next one in its
    stream; the default is an estimate, one to two microseconds"""
    action_overhead: Seconds = Field(default=60e-6, ge=0)
    """host time of an action of the native runtime besides its operators"""
    compute_beside_collectives: float | None = Field(default=None, gt=0, le=1)
    """of its speed, what the native runtime's compute keeps beside kernels of collectives; absent:
    what the link's description says"""
    context_memory: Bytes = Field(ge=0)
    """device memory held by the context and libraries"""
    communicator_memory: Bytes = Field(default=688 << 20, ge=0)
    """device memory of a communicator between GPUs; the default is NCCL's between four A100s with
    NVLink (https://github.com/NVIDIA/nccl/issues/964)"""
    adam_rate: RankRate = Field(gt=0)
    """parameters per second of a fused fp32 AdamW on the device, such as 90 G/s"""
    spread: float = Field(default=0.016, ge=0, le=0.2)
    """standard deviation of the speed of GPUs of a type, all wait for the slowest; the default is
    from ranges of 8% over clusters of thousands (arXiv 2208.11035) and of 5% among the eight of a
    node (stas00/ml-engineering, compute/accelerator)"""

    @model_validator(mode="after")
    def _half_lengths_have_an_efficiency(self) -> Gpu:
        for way in ("forward", "backward"):
            known = getattr(self, f"attention_{way}_efficiency")
            stray = [
                k for k in getattr(self, f"attention_{way}_half_length") or {} if k not in known
            ]
            if stray:
                raise InputError(
                    f"attention_{way}_half_length names {', '.join(stray)}, for which "
                    f"attention_{way}_efficiency has no value; state it there or leave it out here"
                )
        return self

    def gemm_share(self, precision: str) -> float:
        """Fraction of the precision's peak that a large GEMM reaches."""
        shares: dict[str, float] = {
            str(name): s for name, s in (self.gemm_efficiencies or {}).items()
        }
        return shares.get(precision, self.gemm_efficiency)

    def power_limit(self, precision: str) -> float:
        """FLOP/s that products of the precision can keep up; inf where no power limits them."""
        if self.gemm_power_limit is None or precision not in ("bf16", "fp16"):
            return inf
        return self.peak(precision) * self.gemm_power_limit

    def large_products(self, precision: str) -> float:
        """FLOP/s of large products of the precision, one after the other."""
        share = self.gemm_share(precision)
        return min(self.peak(precision) * share, self.power_limit(precision))

    @property
    def runs_kernels(self) -> bool:
        """Whether fused kernels run on the device and copies run beside them; not so on CPUs."""
        return self.device != "cpu"

    def slowest(self, gpus: int) -> float:
        """Seconds of the slowest of `gpus` GPUs in units of the usual one's.

        The largest of n normal values is expected where (n - 3/8) / (n + 1/4) of all are smaller
        (Blom 1958). Parts of one CPU do not differ.
        """
        if self.device == "cpu":
            return 1.0
        return 1.0 + self.spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))

    def peak(self, precision: str) -> float:
        """Dense peak in FLOP/s. Raises InputError where the device has no such precision."""
        rates: dict[str, float] = {str(name): rate for name, rate in self.peak_flops.items()}
        if precision not in rates:
            others = ", ".join(name for name in rates if name not in ("fp8", "fp4"))
            remedy = "leave fp8_gemms off" if precision == "fp8" else f"use precision {others}"
            raise InputError(
                f"{self.name} states no peak for {precision}; {remedy}, "
                f"or add {precision} to its peak_flops if it has it"
            )
        return rates[precision]


def list_gpus() -> tuple[str, ...]:
    """Names of the shipped GPU types, sorted."""
    return shipped.names(GPUS)


def find_gpu(name: str) -> Gpu:
    """A shipped GPU type. Raises InputError."""
    return shipped.find(GPUS, name, Gpu, "GPU type")


NamedGpu = Annotated[Gpu, or_name(Gpu, find_gpu, list_gpus)]
