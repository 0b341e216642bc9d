"""Kernels in Triton's language, compiled ahead or at the first call on a machine, launched without Triton.

To import Triton and to let it find what it has kept takes 0.9 s in each process on an H200, to compile a
kernel up to 1.5 s. So machine code is looked for in the package, filled by :mod:`neula.kernels.ahead`, and in
the user's cache folder, and Triton is imported where neither has it. Its interpreter and GPUs of others than
NVIDIA go Triton's own way.

Tiles of a tensor are moved by GPUs from compute capability 9.0 on by themselves (TMA): the driver encodes
where the tensor lies and how large a tile is (``cuTensorMapEncodeTiled``), and a kernel gets the 128 bytes by
value, and behind them the sizes and strides.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import struct
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, update_wrapper
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from neula.kernels.cuda_source import Capability, driver, kept_in, loaded
from neula.kernels.dispatch import NotReadyError, launched
from neula.kernels.whole_file import keep, read_checked

ALIGNED = 16
"""Multiples that the compiler is given, of addresses in bytes and of sizes and strides in elements."""

INT32 = 1 << 31

COMMON = {"enable_fp_fusion": True}
"""Options whose default differs between versions of Triton."""

Variant = tuple[Any, ...]
"""Key of machine code: for each parameter its value if constant, else its type."""

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bool: "*u1",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_POINTERS = {dtype: (name, f"{name}:{ALIGNED}") for dtype, name in _TYPES.items()}

_INT32, _INT64 = (("i32", f"i32:{ALIGNED}"), ("i64", f"i64:{ALIGNED}"))

_CONSTANT, _DOUBLE, _GENERAL, _SPECIAL = range(4)
"""Parameters of a kernel: constants, numbers in double precision, and others, for which 1 and multiples of
:data:`ALIGNED` are nothing special, or are."""

asked: dict[tuple[str, str, Variant, tuple], None] = {}
"""Variants that this process has made ready: module, kernel, variant and options."""


class _Language:
    """``triton.language``, imported when it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked for by tools that look through a module
            raise AttributeError(name)
        return getattr(import_module("triton.language"), name)


tl: Any = _Language()


@dataclass
class _Ready:
    """A variant that can be launched."""

    launch: Any
    block: tuple[int, int, int]  # threads
    shared_bytes: int
    # For each argument that is read or written in tiles how they are encoded.
    maps: list[tuple[int, tuple[int, ...]]]
    begins: tuple[int, ...] | None = None  # of its arguments, once it was launched

    @classmethod
    def from_content(cls, content: bytes, device: torch.device) -> _Ready:
        """Load the content that :meth:`TritonKernel.compiled` returns."""
        line, _, binary = content.partition(b"\n")
        about = json.loads(line)
        launch = loaded(binary, about["name"], device, about["shared"])
        maps = [(swizzle, tuple(box)) for swizzle, box in about["maps"]]
        return cls(launch, (32 * about["num_warps"], 1, 1), about["shared"], maps)

    def __call__(self, grid: Sequence[int], values: list[Any]) -> None:
        x, y, z = (*grid, 1, 1)[:3]
        if not x * y * z:
            return
        words, maps = values, iter(self.maps)
        if self.maps:
            words = []
            for value in values:
                if isinstance(value, Tiles):
                    words += value.words(*next(maps), driver())
                else:
                    words.append(value)
        if self.begins is None:
            self.begins = tuple(_begins(values))
        # Two addresses of scratch memory, which none of the kernels has, come after all else.
        self.launch.of_words((x, y, z), self.block, [*words, 0, 0], self.begins, self.shared_bytes)


def _begins(values: Sequence[Any]) -> Iterator[int]:
    """Where the arguments of a kernel begin, in bytes."""
    end = 0
    for x in [*values, 0, 0]:
        for begin in x.begins(end) if isinstance(x, Tiles) else (end,):
            yield begin
        end = begin + 8


class TritonKernel:
    """A function in Triton's language, for others of its kind or, as ``kernel[grid](...)``, for launches."""

    __name__: str

    def __init__(self, function: Callable[..., Any], general: Collection[str]) -> None:
        update_wrapper(self, function)
        self.function: Any = function
        self.general = tuple(general)
        code = self.function.__code__
        self.names = code.co_varnames[: code.co_argcount]
        self._kinds = tuple(map(self._kind, self.names))
        self._ready: dict[tuple, _Ready | None] = {}

    def _kind(self, name: str) -> int:
        annotation = self.function.__annotations__.get(name, "")
        if annotation == "tl.constexpr":
            return _CONSTANT
        if annotation == "tl.float64":
            return _DOUBLE
        return _GENERAL if name in self.general else _SPECIAL

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def __call__(self, *args: Any) -> Any:  # from another kernel, which Triton reads
        raise TypeError(f"{self.__name__} is a kernel, and launched as {self.__name__}[grid](...)")

    def _launch(self, grid: Sequence[int], *args: Any, **options: Any) -> None:
        if len(args) < len(self.names):
            args += tuple(options.pop(name) for name in self.names[len(args) :])
        first = args[0] if isinstance(args[0], torch.Tensor) else _first_tensor(args)
        if not first.is_cuda:
            self.by_triton[grid](*map(_of_triton, args), **options)
            return
        variant, values = self._variant(args)
        key = (first.get_device(), variant, *options.items())
        if key not in self._ready:
            try:
                self._ready[key] = self._made_ready(variant, tuple(options.items()), first.device)
            except Exception as error:
                raise NotReadyError(str(error)) from error
        if (ready := self._ready[key]) is not None:
            ready(grid, values)
            return
        with torch.cuda.device_of(first):
            self.by_triton[grid](*map(_of_triton, args), **options)
        launched.count += 1

    def _variant(self, args: Sequence[Any]) -> tuple[Variant, list[Any]]:
        """The variant of these arguments, and the numbers that its machine code is given."""
        variant: list[Any] = []
        values: list[Any] = []
        for x, kind in zip(args, self._kinds, strict=True):
            if kind == _CONSTANT:
                variant.append(x)
            elif kind == _DOUBLE:
                variant.append("fp64")
                values.append(_bits("<d", "<q", x))
            elif isinstance(x, torch.Tensor):
                address = x.data_ptr()
                variant.append(_POINTERS[x.dtype][address % ALIGNED == 0])
                values.append(address)
            elif x.__class__ is int:
                if kind == _SPECIAL and x == 1:
                    variant.append(1)
                else:
                    names = _INT32 if -INT32 <= x < INT32 else _INT64
                    variant.append(names[kind == _SPECIAL and x % ALIGNED == 0])
                    values.append(x)
            elif isinstance(x, bool):
                variant.append("u1")
                values.append(int(x))
            elif isinstance(x, float):
                variant.append("fp32")
                values.append(_bits("<f", "<i", x))
            elif isinstance(x, Tiles):
                variant.append(x.type)
                values.append(x)
            elif x is None:
                variant.append(None)
            else:
                raise TypeError(f"{self.__name__} takes no {type(x).__name__}")
        return tuple(variant), values

    def _made_ready(self, variant: Variant, options: tuple, device: torch.device) -> _Ready | None:
        """A variant for launches; None where only Triton launches it."""
        asked[self.function.__module__, self.__name__, variant, options] = None
        capability = torch.cuda.get_device_capability(device)
        if only_by_triton(variant, capability):
            return None
        name = self.file_name(variant, options)
        for folder in kept_in(capability):
            with suppress(OSError, RuntimeError):  # it is not there, is damaged, or too new for the driver
                return _Ready.from_content(read_checked(folder / name), device)
        content = self.compiled(variant, options, capability)
        keep(kept_in(capability)[0] / name, content)
        return _Ready.from_content(content, device)

    def file_name(self, variant: Variant, options: tuple) -> str:
        """Name of the file with the machine code; it changes with everything that the code depends on."""
        text = repr((self._source, self.__name__, variant, options, tuple(COMMON.items())))
        return f"{self.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.cubin"

    @cached_property
    def _source(self) -> str:
        """Sources of this kernel and of the kernels that it calls, with the constants that they read."""
        parts = set()
        for kernel in self.reached():
            file = sys.modules[kernel.function.__module__].__file__
            assert file is not None
            parts.add(hashlib.sha256(Path(file).read_bytes()).hexdigest())
            parts |= {f"{name}={x!r}" for name, x in kernel.read() if isinstance(x, int | float)}
        return " ".join(sorted(parts))

    def read(self) -> Iterator[tuple[str, Any]]:
        """Names of its module that the function reads, with their values."""
        scope = self.function.__globals__
        return ((name, scope[name]) for name in self.function.__code__.co_names if name in scope)

    def reached(self) -> set[TritonKernel]:
        """The kernel and those that it calls."""
        found, left = set[TritonKernel](), [self]
        while left:
            if (kernel := left.pop()) not in found:
                found.add(kernel)
                left += [x for _, x in kernel.read() if isinstance(x, TritonKernel)]
        return found

    @cached_property
    def by_triton(self) -> Any:
        """The function as Triton takes it: what it reads is Triton's language, kernels and constants."""
        triton = import_module("triton")
        scope = {**self.function.__globals__, "tl": triton.language}
        for name, x in self.read():
            if isinstance(x, TritonKernel):
                scope[name] = x.by_triton
            elif isinstance(x, int | float):
                scope[name] = triton.language.constexpr(x)
        function = FunctionType(self.function.__code__, scope, self.__name__, self.function.__defaults__)
        for name in ("__annotations__", "__module__", "__qualname__", "__doc__"):
            setattr(function, name, getattr(self.function, name))
        return triton.jit(function, do_not_specialize=self.general)

    def compiled(self, variant: Variant, options: tuple, capability: Capability) -> bytes:
        """Machine code by Triton, for which no GPU is needed, behind a line of what a launch has to know."""
        compiler, backends = import_module("triton.compiler"), import_module("triton.backends.compiler")
        signature, constants, attributes = {}, {}, {}
        for i, (name, x, kind) in enumerate(zip(self.names, variant, self._kinds, strict=True)):
            if _is_constant(x, kind):
                signature[name], constants[i,] = "constexpr", _of_triton(x)
            else:
                signature[name], _, aligned = x.partition(":")
                if aligned:
                    attributes[i,] = [["tt.divisibility", ALIGNED]]
        source = compiler.ASTSource(self.by_triton, signature, constants, attributes)
        target = backends.GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
        made = compiler.compile(source, target, {**COMMON, **dict(options)})
        about = {name: getattr(made.metadata, name) for name in ("name", "shared", "num_warps")}
        about["maps"] = [
            (each["swizzle"], each["block_size"]) for each in made.metadata.tensordesc_meta or ()
        ]
        if made.metadata.global_scratch_size or made.metadata.num_ctas > 1:
            raise RuntimeError(f"{self.__name__} asks for scratch memory or clusters, and no launch has them")
        return json.dumps(about).encode() + b"\n" + made.asm["cubin"]


def jit(function: Callable[..., Any] | None = None, *, do_not_specialize: Collection[str] = ()) -> Any:
    """In the place of ``triton.jit``, in a module with ``from __future__ import annotations`` and ``tl`` of
    this one, whose numbers are constants.

    ``do_not_specialize`` names parameters of which neither 1 nor multiples of 16 are worth machine code of
    their own.
    """
    if function is None:
        return partial(jit, do_not_specialize=do_not_specialize)
    return TritonKernel(function, do_not_specialize)


def only_by_triton(variant: Variant, capability: Capability) -> bool:
    """Whether a GPU is too old to move tiles by itself: Triton takes them apart, in a way of its version."""
    return capability < OLDEST and any(str(x).startswith("tensordesc") for x in variant)


def _first_tensor(args: Sequence[Any]) -> torch.Tensor:
    """Among arguments, or of one of them."""
    tensors = (x.tensor if isinstance(x, Tiles) else x for x in args)
    return next(x for x in tensors if isinstance(x, torch.Tensor))


def _is_constant(x: Any, kind: int) -> bool:
    return kind == _CONSTANT or x is None or x == 1


def _of_triton(x: Any) -> Any:
    """A dtype of torch is one of Triton's language there, and tiles have another form."""
    if isinstance(x, Tiles):
        return x.for_triton
    return getattr(tl, str(x).removeprefix("torch.")) if isinstance(x, torch.dtype) else x


@lru_cache(maxsize=1024)
def _bits(form: str, whole: str, x: float) -> int:
    found: int = struct.unpack(whole, struct.pack(form, x))[0]
    return found


OLDEST = (9, 0)
"""Compute capability."""

_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
_KINDS = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
_BYTES, _ALIGNED = 128, 64
_NOT_INTERLEAVED, _PROMOTED_TO_128_BYTES, _ZEROS_OUTSIDE = 0, 2, 0


@dataclass(frozen=True, eq=False)
class Tiles:
    """A tensor that a kernel reads or writes in tiles."""

    # Begins at a multiple of 16 bytes, as does each row; its last dimension is contiguous.
    tensor: torch.Tensor
    block: tuple[int, ...]  # sizes of a tile, one for each dimension

    @property
    def type(self) -> str:
        """The type of the argument in the signature of a Triton kernel."""
        return _type(self.tensor.dtype, self.block)

    @property
    def for_triton(self) -> Any:
        """Triton's own form."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        return TensorDescriptor.from_tensor(self.tensor, list(self.block))

    def words(self, swizzle: int, box: tuple[int, ...], library: Any) -> tuple[int, ...]:
        """The words that a kernel reads, eight bytes each: the descriptor, sizes and strides.

        ``swizzle``, the layout of a tile in shared memory, and ``box``, the shape of one copy, are by the
        compiler; ``library`` is CUDA's driver.
        """
        x = self.tensor
        return _encoded(x.data_ptr(), x.dtype, x.shape, x.stride(), swizzle, box, library)

    def begins(self, start: int) -> Iterator[int]:
        """Where what :meth:`words` returns begins, in bytes: the descriptor, each size and each stride."""
        yield start
        yield from range(start + _BYTES, start + _BYTES + 16 * self.tensor.ndim, 8)


@lru_cache
def _type(dtype: torch.dtype, block: tuple[int, ...]) -> str:
    return f"tensordesc<{_NAMES[dtype]}{list(block)}>"


@lru_cache(maxsize=1024)
def _encoded(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    swizzle: int,
    box: tuple[int, ...],
    library: Any,
) -> tuple[int, ...]:
    """Encode a tensor map. Dimensions are counted from the last one."""
    rank = len(shape)
    room = ctypes.create_string_buffer(_BYTES + _ALIGNED)
    place = -(-ctypes.addressof(room) // _ALIGNED) * _ALIGNED
    failed = library.cuTensorMapEncodeTiled(
        ctypes.c_void_p(place),
        _KINDS[dtype],
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*reversed(shape)),
        (ctypes.c_uint64 * rank)(*(dtype.itemsize * stride for stride in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(box)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        _NOT_INTERLEAVED,
        swizzle,
        _PROMOTED_TO_128_BYTES,
        _ZEROS_OUTSIDE,
    )
    if failed:
        raise RuntimeError(
            f"a tensor of shape {shape} and strides {strides} cannot be moved in tiles of {box}"
        )
    return (*(ctypes.c_int64 * (_BYTES // 8)).from_address(place), *shape, *strides)
