"""Public functions as operators of torch, ``torch.ops.neula``, which compilers can have in a graph: from
tensors, numbers and names to the answer and its evidence.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from neula.engines import Engine
from neula.pipeline.call import restored
from neula.pipeline.derivatives import Attached, PrimalFunction, Tensors, is_legacy_batch, leading, no_answer
from neula.pipeline.inputs import is_spread, refuse_gradient, tensors_in
from neula.pipeline.plans import Plans
from neula.pipeline.progress import showing

PROXY = torch._C._TorchDispatchModeKey.PROXY  # the mode of ``make_fx`` and ``torch.func.linearize``


EXCLUDED, KEYS = torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey
"""Whether this thread leaves out a step of torch's dispatch, and the names of steps."""

OF_PARTS = {"complex64": "float32", "complex128": "float64"}  # compilers do not know ``to_real``


class Operator:
    """An operator of torch with its shapes, derivatives and batches.

    ``schema``: name, arguments and results, as in torch: first the operands, then options. ``compute``: from
    the operands, and options by name as the public function has them, to the results. ``shapes``: from the
    operands to shapes and dtypes of the results. ``again``: from the options to what the derivatives solve,
    factorize or multiply with.
    """

    def __init__(
        self,
        schema: str,
        function: type[Attached],
        compute: Callable[..., Sequence[torch.Tensor]],
        shapes: Callable[..., Sequence[tuple[tuple[int, ...], torch.dtype]]],
        again: Callable[..., Callable[..., Any]] | None = None,
    ) -> None:
        name, _, signature = schema.partition("(")
        self._function, self._again = function, again

        def real(*inputs: Any) -> Any:
            # Below autograd tangents cannot be distinguished. Within a dispatch mode, as at the first run of
            # a compiled function, pending conjugates and signs would be ignored.
            tangents = forward_ad._set_fwd_grad_enabled(False)
            with tangents, EXCLUDED(KEYS.Conjugate, False), EXCLUDED(KEYS.Negative, False):
                operands, options = self._split(inputs)
                found = compute(*operands, **self._named(options))
            return self._returned(_separate(found, inputs[: function.operands]))

        def fake(*inputs: Any) -> Any:
            found = shapes(*inputs[: function.operands])
            return self._returned(tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in found))

        operator = torch.library.custom_op(f"neula::{name}", real, mutates_args=(), schema=f"({signature}")
        operator.register_fake(fake)
        operator.register_autograd(self._backward, setup_context=self._keep)
        operator.register_vmap(self._batched)
        self.packet = getattr(torch.ops.neula, name)
        found = self.packet.default._schema
        self._single = len(found.returns) == 1
        self._defaults = {x.name: x.default_value for x in found.arguments[function.operands :]}

    def by_name(self, *operands: torch.Tensor, **options: Any) -> Tensors:
        """The results for options of a public function; those that are none of the operator are left out."""
        given = {name: options.get(name, default) for name, default in self._defaults.items()}
        if "accuracy" in given:
            given["accuracy"] = name_of(given["accuracy"])
        return self(*operands, *given.values())

    def __call__(self, *inputs: Any) -> Tensors:
        """The results, with derivatives of both modes, also for tensors that a transform hides."""
        if torch.compiler.is_compiling():  # what compilers trace has the derivatives of the operator itself
            return self._called(*inputs)
        operands, options = self._split(inputs)
        return self._function.apply(*operands, self._primal(options))

    def _called(self, *inputs: Any) -> Tensors:
        found = self.packet.default(*inputs)
        return (found,) if self._single else found

    def _returned(self, found: Tensors) -> Any:
        return found[0] if self._single else found

    def _split(self, inputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        count = self._function.operands
        return inputs[:count], inputs[count:]

    def _named(self, options: Sequence[Any]) -> dict[str, Any]:
        """Options as the public function has them, those that were left out by default."""
        given = self._defaults | dict(zip(self._defaults, options, strict=False))
        if "accuracy" in given:
            given["accuracy"] = accuracy_of(given["accuracy"])
        return given

    def _primal(self, options: Sequence[Any]) -> PrimalFunction:
        again = no_answer if self._again is None else self._again(**self._named(options))
        return PrimalFunction(lambda *operands: self._called(*operands, *options), again, may_raise=False)

    def _keep(self, ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        operands, ctx.options = self._split(inputs)
        found = (output,) if self._single else output
        ctx.save_for_backward(*self._function.tensors_kept(operands, found))

    def _backward(self, ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        wanted = ctx.needs_input_grad[: self._function.operands]
        given = gradients[: self._function.answers]
        found = self._function.pulled_back(self._primal(ctx.options), wanted, ctx.saved_tensors, *given)
        return *found, *(None,) * len(ctx.options)

    def _batched(self, info: Any, dims: Any, *inputs: Any) -> tuple[Any, Any]:
        operands, options = self._split(inputs)
        found = self._called(*leading(operands, dims), *options)
        return (found[0], 0) if self._single else (found, (0,) * len(found))


def _separate(found: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Tensors:
    """Results as compilers expect them: row-major, on the device of the input, each in memory of its own."""
    seen = {x.untyped_storage().data_ptr() for x in given}
    separate = []
    for x in found:
        x = x.detach().resolve_conj().to(given[0].device).contiguous()
        memory = x.untyped_storage().data_ptr()
        separate.append(x.clone() if memory in seen or x.storage_offset() else x)
        seen.add(memory)
    return tuple(separate)


def is_traced(given: Sequence[Any]) -> bool:
    """Whether numbers of tensors cannot be read: in compiled or transformed functions, or on "meta"."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack() and torch._C._get_dispatch_mode(PROXY) is not None:
        return True
    usual = torch.Tensor.__torch_dispatch__
    for x in given:
        if type(x) is torch.Tensor and not x.is_meta:  # microseconds count
            if is_legacy_batch(x):
                return True
            continue
        hidden = isinstance(x, torch.Tensor) and (x.is_meta or type(x).__torch_dispatch__ is not usual)
        if hidden and not is_spread(x):
            return True
    return False


def engine_for(engine: Engine, *operands: torch.Tensor) -> Any:
    """An engine, or its name where an operator works for operands whose numbers cannot be read."""
    return engine.name if any(map(is_legacy_batch, operands)) else engine


def is_hidden(x: torch.Tensor) -> bool:
    """Whether a transform hides a tensor, so that its gradients are unknown."""
    if torch.compiler.is_compiling():  # and does not know these functions
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or is_legacy_batch(x)


def refuse_variable(x: Any, name: str) -> None:
    """A derivative that an operator does not have must be an error, and a tensor that a transform hides."""
    refuse_gradient(x, name)
    if isinstance(x, torch.Tensor) and is_hidden(x):
        raise ValueError(
            f"a transform of torch.func hides {name}, and this function has neither derivatives nor vmap for "
            "it: pass what the transform does not touch"
        )


def name_of(accuracy: Any) -> str | None:
    """An accuracy as an operator takes it."""
    if accuracy is None or isinstance(accuracy, str):
        return accuracy
    if isinstance(accuracy, torch.dtype):
        name = str(accuracy).removeprefix("torch.")
        return OF_PARTS.get(name, name)
    return repr(float(accuracy)) if isinstance(accuracy, float | int) else np.dtype(accuracy).name


def accuracy_of(name: str | None) -> str | float | None:
    try:
        return None if name is None else float(name)
    except ValueError:
        return name


P = ParamSpec("P")
T = TypeVar("T")


def with_operator(
    traced: Callable[..., Any], plans: Plans | None = None
) -> Callable[[Callable[P, T]], Callable[..., T]]:
    """:func:`eager` for a function that has an operator of torch, which takes its place in a graph."""
    return lambda function: eager(function, traced, plans)


def eager(
    function: Callable[P, T], traced: Callable[..., Any] | None = None, plans: Plans | None = None
) -> Callable[..., T]:
    """Run a function as it stands, a graph break for ``torch.compile``, and leave modes as they were;
    ``progress=True`` becomes a bar.

    The chains read their numbers at every step. Traced, they are many graphs, compiled anew for each
    shape, and not faster. ``traced``: replacement by an operator of torch if numbers cannot be read; it
    returns None for unsupported arguments. ``plans``: replacement for problems like an earlier one.
    """
    disabled: Callable[P, T] | None = None
    name = function.__name__
    careful = restored(showing(function))
    if plans is not None:
        plans.signature = inspect.signature(function)

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        given = (*args, *kwargs.values())
        if is_traced(given):
            found: T | None = None if traced is None else traced(*args, **kwargs)
            if found is not None:
                return found
            if any(map(is_hidden, tensors_in(given))):
                raise ValueError(
                    f"a transform of torch.func hides an operand of {name}, which has neither derivatives "
                    "nor vmap for these arguments: call it outside of the transform; batches need none"
                )
        elif plans is not None and (soon := plans(args, kwargs)) is not None:
            return soon
        # The compiler takes longer to import than torch itself; if it is not imported, nothing is compiled.
        if "torch._dynamo" not in sys.modules:
            return careful(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(careful)
        return disabled(*args, **kwargs)

    # The compiler counts the versions of a code object, and gives up at eight: one object for each function.
    call.__code__ = call.__code__.replace(co_name=function.__name__)
    return functools.wraps(function)(call)
