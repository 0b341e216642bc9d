"""Which version of a function is called, and when a kernel is tried."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import time
import warnings
from operator import neg  # noqa: F401

import pytest
import torch
from tests.devices import OnGPU

import neula.kernels
from neula.kernels import dispatch
from neula.kernels.dispatch import OLDEST, Kernel, Trial, kernel, trial

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@trial("The kernel", "plain torch takes its place")
def never(device: torch.device) -> None:
    pytest.fail("tried without need")


@kernel("neg", trial=never, when=lambda a: a.numel() > 0)
def negative(a: torch.Tensor) -> torch.Tensor:
    """Minus A, twice as large so that the two are told apart."""
    return -2 * a


def test_every_kernel_has_a_launch() -> None:
    """Names are looked up when a GPU asks for them."""
    modules = pkgutil.walk_packages(neula.kernels.__path__, "neula.kernels.")
    found = [x for module in modules for x in vars(importlib.import_module(module.name)).values()]
    kernels = [x for x in found if isinstance(x, Kernel)]
    assert len(kernels) > 50
    for each in kernels:
        assert callable(each.kernel)


def test_tensors_on_a_cpu_go_to_the_reference_and_nothing_is_tried() -> None:
    assert not negative.takes(torch.ones(1))
    assert not negative.runs(CPU)
    assert negative(torch.ones(1)) == negative.reference(a=torch.ones(1)) == -2
    assert negative.kernel(torch.ones(1)) == -1
    assert negative.__doc__ == negative.reference.__doc__


def test_what_the_kernel_takes_goes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(negative, "takes", lambda a: a > 1)
    assert negative(torch.tensor(1.0)) == -2
    assert negative(torch.tensor(3.0)) == -3


def test_a_device_is_tried_once_by_any_number_of_threads() -> None:
    calls = []

    def launch(*device: torch.device) -> None:
        calls.append(device)
        time.sleep(0.05)

    tried = Trial(launch, "The kernel", "plain torch takes its place")
    threads = [threading.Thread(target=tried.passed, args=(GPU, n % 2)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(calls, key=str) == [(GPU, 0), (GPU, 1)]


def test_a_missing_package_is_no_reason_to_warn(recwarn: pytest.WarningsRecorder) -> None:
    def launch(device: torch.device) -> None:
        raise ImportError("no Triton")

    assert not Trial(launch, "The kernel", "plain torch takes its place").passed(GPU)
    assert not recwarn.list


def test_any_other_failure_is_told_once() -> None:
    def launch(device: torch.device) -> None:
        raise RuntimeError("no C compiler")

    tried = Trial(launch, "The kernel", "plain torch takes its place")
    with pytest.warns(RuntimeWarning, match="The kernel cannot run on cuda:0; plain torch.*no C compiler"):
        assert not tried.passed(GPU)
    with warnings.catch_warnings(action="error"):
        assert not tried.passed(GPU)


def test_a_capture_is_refused_before_anything_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the kernel is tried afterwards as if nothing had happened."""
    tried = Trial(lambda device: None, "The kernel", "plain torch takes its place")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"the kernel must be made ready.*once before the capture"):
        tried.passed(GPU)
    with pytest.raises(RuntimeError, match="before the capture"):
        negative.takes(on_gpu())
    with pytest.raises(RuntimeError, match="before the capture"):
        negative.runs(GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tried.passed(GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tried.passed(GPU)


def test_kernels_take_real_numbers_as_they_lie_in_memory() -> None:
    """The imaginary part of a conjugate is a view of numbers that are to be negated."""

    @kernel("neg", trial=trial("The kernel", "plain torch takes its place")(lambda device: None))
    def negative(a: torch.Tensor) -> torch.Tensor:
        return -a

    z = torch.ones(3, dtype=torch.complex128)
    assert [negative.takes(x.as_subclass(OnGPU)) for x in (z.real, z.imag, z.conj().imag, z)] == [
        *(True, True, False, False)
    ]


def on_gpu() -> torch.Tensor:
    return torch.ones(1).as_subclass(OnGPU)


@pytest.mark.parametrize(("capability", "likely"), [(OLDEST, True), ((7, 5), False)])
def test_a_kernel_is_expected_to_run_until_it_has_failed(
    capability: tuple[int, int], likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    dispatch._compiles.cache_clear()

    @trial("The kernel", "plain torch takes its place")
    def fails(device: torch.device) -> None:
        raise RuntimeError("no compiler")

    likely_one = kernel("x_triton", trial=fails)(torch.neg)
    assert likely_one.expected(GPU) == likely
    assert not likely_one.expected(CPU)
    with pytest.warns(RuntimeWarning, match="no compiler"):
        assert not likely_one.runs(GPU)
    assert not likely_one.expected(GPU)
    dispatch._compiles.cache_clear()


def test_a_variant_that_fails_leaves_the_others_to_the_kernel() -> None:
    @trial("The kernel", "plain torch takes its place")
    def narrow_only(device: torch.device, columns: int) -> None:
        if columns > 128:
            raise RuntimeError("too little shared memory")

    wide = kernel("neg", trial=narrow_only, variant=lambda a, columns: columns)(lambda a, columns: "by torch")
    assert wide.takes(on_gpu(), 128)
    with pytest.warns(RuntimeWarning, match="too little shared memory"):
        assert wide(on_gpu(), 256) == "by torch"
    assert wide.takes(on_gpu(), 128)
