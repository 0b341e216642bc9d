"""Which version of a function is called, and when a kernel is tried."""

from __future__ import annotations

import importlib
import pkgutil
import threading
import time
import warnings
from collections.abc import Iterator
from operator import neg  # noqa: F401

import pytest
import torch

import neula.kernels
from neula.kernels import dispatch
from neula.kernels.dispatch import OLDEST, Kernel, NotReadyError, Trial, kernel, launched

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@kernel("neg", when=lambda a: a.numel() > 0)
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


def test_tensors_on_a_cpu_go_to_the_reference() -> None:
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
    with pytest.raises(RuntimeError, match=r"the kernel of negative must be made ready.*before the capture"):
        negative.takes(on_gpu())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tried.passed(GPU)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert tried.passed(GPU)


class OnGPU(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda, device = True, GPU


def on_gpu() -> torch.Tensor:
    return torch.ones(1).as_subclass(OnGPU)


@pytest.fixture(autouse=True)
def capability(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """There is a compiler of kernels, and the GPU is new enough."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: OLDEST)
    monkeypatch.setattr(dispatch, "find_spec", lambda name: name)
    dispatch._is_made_for.cache_clear()
    yield
    dispatch._is_made_for.cache_clear()


@pytest.mark.parametrize(("found", "new"), [(OLDEST, True), ((7, 5), False)])
def test_kernels_are_for_gpus_that_are_new_enough(
    found: tuple[int, int], new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found)
    one = kernel("x_triton")(torch.neg)
    assert one.runs(GPU) == one.takes(on_gpu()) == new
    assert not one.runs(CPU)
    fails = Trial(lambda device: 1 / 0, "The kernel", "plain torch takes its place")
    with pytest.warns(RuntimeWarning, match="The kernel cannot run"):
        assert not kernel("x_triton", trial=fails)(torch.neg).runs(GPU)


def not_ready(a: torch.Tensor, *, overwrites: bool = False) -> torch.Tensor:
    """In the place of a kernel whose machine code is not there."""
    launched.count += overwrites
    raise NotReadyError("no C compiler")


def test_plain_torch_takes_the_place_of_a_kernel_without_machine_code() -> None:
    function = kernel(not_ready)(lambda a, overwrites=False: "by torch")
    with pytest.warns(RuntimeWarning, match=r"cannot run on cuda:0; plain torch.*no C compiler"):
        assert function(on_gpu()) == "by torch"
    assert not function.runs(GPU)
    with warnings.catch_warnings(action="error"):
        assert function(on_gpu()) == "by torch"


def test_what_a_launch_may_have_overwritten_does_not_go_to_plain_torch() -> None:
    function = kernel(not_ready)(lambda a, overwrites=False: "by torch")
    with pytest.raises(NotReadyError):
        function(on_gpu(), overwrites=True)
    assert function(on_gpu(), overwrites=True) == "by torch"


def test_a_missing_package_makes_no_kernel_warn(recwarn: pytest.WarningsRecorder) -> None:
    def no_package(a: torch.Tensor) -> None:
        raise NotReadyError("no Triton") from ImportError("no Triton")

    assert kernel(no_package)(lambda a: "by torch")(on_gpu()) == "by torch"
    assert not recwarn.list
