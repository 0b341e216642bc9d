"""Floating-point formats and their unit roundoffs, and rounding to them on tensors that are wider."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from neula.errors import check_name

FormatName = Literal["fp16", "bf16", "tf32", "fp32", "fp64"]


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes
    ----------
    name : str
    significand : int
        Bits of the significand, the implicit one included.
    max_exponent : int
        Exponent of the largest numbers; ``2**(max_exponent + 1)`` overflows.
    dtype : torch.dtype
        The narrowest torch type that holds every number of the format.
    """

    name: FormatName
    significand: int
    max_exponent: int
    dtype: torch.dtype

    @cached_property
    def u(self) -> float:
        """Unit roundoff: the largest relative error of rounding to nearest."""
        return 2.0**-self.significand

    @property
    def largest(self) -> float:
        """Largest finite number."""
        return (2.0 - 2.0 ** (1 - self.significand)) * 2.0**self.max_exponent

    @property
    def storage(self) -> torch.dtype:
        """The type in which products of this format are summed and factors are kept."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


FP16 = Format("fp16", 11, 15, torch.float16)
BF16 = Format("bf16", 8, 127, torch.bfloat16)
TF32 = Format("tf32", 11, 127, torch.float32)
FP32 = Format("fp32", 24, 127, torch.float32)
FP64 = Format("fp64", 53, 1023, torch.float64)

FORMATS: dict[str, Format] = {f.name: f for f in (FP16, BF16, TF32, FP32, FP64)}
_OF_DTYPE = {f.dtype: f for f in (FP16, BF16, FP32, FP64)}
_OF_DTYPE |= {torch.complex64: FP32, torch.complex128: FP64}


FP16_COR = "fp16_cor"  # the name of half precision with error correction


@dataclass(frozen=True)
class Arithmetic:
    """The format of the operands of a product, and whether rounding errors are corrected.

    Attributes
    ----------
    operands : Format
        Format of the operands.
    corrected : bool
        Whether each is the sum of two numbers of the format, so that large products are as accurate as in
        float32. Small ones are in float32 itself.
    """

    operands: Format
    corrected: bool = False

    @classmethod
    def named(cls, name: str) -> Arithmetic:
        """Look an arithmetic up by name; a ValueError lists those that there are."""
        check_name("format", name, (*FORMATS, FP16_COR))
        return cls(FP16, corrected=True) if name == FP16_COR else cls(FORMATS[name])

    @property
    def name(self) -> str:
        """Its name in the user's options."""
        return FP16_COR if self.corrected else self.operands.name

    @property
    def format(self) -> Format:
        """The format whose accuracy it has."""
        return FP32 if self.corrected else self.operands

    @property
    def u(self) -> float:
        """Unit roundoff."""
        return self.format.u


def format_named(name: str) -> Format:
    """Look a format up by name; a ValueError lists those that there are."""
    check_name("format", name, FORMATS)
    return FORMATS[name]


def format_of(dtype: torch.dtype) -> Format:
    """The format of the numbers of a dtype; of a complex dtype, of its parts."""
    return _OF_DTYPE[dtype]


def in_double(x: torch.Tensor) -> torch.Tensor:
    """``x`` in double precision, real or complex as it is; itself where it is in that."""
    return x.to(torch.complex128) if x.is_complex() else x.double()


def double_gram(x: torch.Tensor) -> torch.Tensor:
    """``X^H X`` in double precision."""
    wide = in_double(x)
    return wide.mH @ wide


def double_of(dtype: torch.dtype) -> torch.dtype:
    """float64, or complex128 for a complex dtype."""
    return matching_dtype(torch.float64, dtype)


def matching_dtype(precision: torch.dtype, like: torch.dtype) -> torch.dtype:
    """A real dtype, or the complex one with parts in it for a complex ``like``."""
    return precision.to_complex() if like.is_complex else precision


def round_to(x: torch.Tensor, target: Format) -> torch.Tensor:
    """Round a float32 or float64 tensor to ``target`` (to nearest, ties to even), kept in its own dtype.

    Subnormal numbers of the target are kept, and what is too large for it becomes infinite, as on tensor
    cores.

    >>> round_to(torch.tensor([1 + 2.0**-11, 7e4, 1e-9]), FP16)
    tensor([1., inf, 0.])
    """
    if target.dtype == x.dtype and target is not TF32:
        return x
    single = _to_odd(x) if x.dtype == torch.float64 and target is not FP32 else x.to(torch.float32)
    if target is not TF32:
        return single.to(target.dtype).to(x.dtype)
    bits = single.view(torch.int32)
    half_of_last_bit = 0x0FFF + ((bits >> 13) & 1)
    rounded = ((bits + half_of_last_bit) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded.to(x.dtype), x)


def _to_odd(x: torch.Tensor) -> torch.Tensor:
    """float64 to float32, truncated, with the last bit set where something was cut off.

    Rounding that to a narrower format gives the same as rounding once (Boldo and Melquiond, "Emulation of
    FMA and correctly rounded sums", IEEE Trans. Comput. 57, 2008).
    """
    nearest = x.to(torch.float32)
    bits = nearest.view(torch.int32) - (nearest.double().abs() > x.abs()).int()
    return (bits | (bits.view(torch.float32).double() != x).int()).view(torch.float32)
