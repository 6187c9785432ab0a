"""In how many words memory runs out, and which only sound like it."""

from __future__ import annotations

import errno

import pytest
import torch
from torch import Tensor, nn

import wholebatch as wb
from tests.oracle import assert_same_gradient, whole_batch
from wholebatch.model.memory import is_out_of_memory

SHORT = {
    "allocator": "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB",
    "allocator of another device": "XPU out of memory. Tried to allocate 2.00 GiB",
    "HIP allocator": "HIP out of memory. Tried to allocate 2.00 GiB",
    "NPU allocator": "NPU out of memory. Tried to allocate 2.00 GiB",
    "MPS allocator": "MPS backend out of memory (MPS allocated: 1.00 GB, other allocations: 2.00 GB)",
    "runtime": "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "HIP runtime": "HIP error: out of memory",
    "driver": "CUDA driver error: out of memory",
    "Triton": "Triton Error [CUDA]: out of memory",
    "Triton on HIP": "Triton Error [HIP]:  Code: 2, Messsage: out of memory",
    "driver's constant": "CUDA_ERROR_OUT_OF_MEMORY",
    "runtime's constant": "cudaErrorMemoryAllocation: out of memory",
    "SYCL": "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "OpenCL": "could not create a memory object: CL_MEM_OBJECT_ALLOCATION_FAILURE",
    "cuBLAS": "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuBLAS without room for a handle": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN": "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "cuDNN 9": "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cuDNN's refusal": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "cuDNN without an algorithm": "Unable to find a valid cuDNN algorithm to run convolution",
    "cuDNN without an engine": "GET was unable to find an engine to execute this computation",
    "cuFFT": "cuFFT error: CUFFT_ALLOC_FAILED",
    "cuSOLVER": "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`",
    "cuSPARSE": "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "cuRAND": "CURAND_STATUS_ALLOCATION_FAILED",
    "rocBLAS": "rocblas error: rocblas_status_memory_error",
    "XLA": "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2147483648 bytes.",
    "host": "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 8 bytes. Error code 12 (Cannot allocate memory)",
    "host on Windows": "[enforce fail at alloc_cpu.cpp:116] data. DefaultCPUAllocator: not enough memory: you tried "
    "to allocate 800 bytes.",
    "C++": "std::bad_alloc",
    "mapped file": "unable to mmap 8192 bytes from file </torch_1>: Cannot allocate memory (12)",
    "a library": "workspace: failed to allocate 4096 bytes",
}
"""Words of runtime errors that mean it."""

UNLIKE = {
    "a key": KeyError("CUDA out of memory"),
    "a user's value": ValueError("CUDA out of memory"),
    "a budget": RuntimeError("the batch is out of memory range"),
    "a bank": RuntimeError("the memory bank has run out of memory slots"),
    "a name": RuntimeError("Error(s) in loading: unexpected key 'out of memory' in state_dict"),
    "a primitive": RuntimeError("could not create a primitive"),
    "shared memory": RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376"),
    "a wrong use of cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(...)`"),
    "a failing kernel": RuntimeError("CUDA error: an illegal memory access was encountered"),
    "a failing allocation of names": RuntimeError("failed to allocate a port for the server"),
    "another rank": wb.SyncError("Rank 1 failed in this window. It said: OutOfMemoryError: CUDA out of memory."),
    "our last word": wb.OutOfMemoryError("One row alone does not fit into memory"),
    "a collective": torch.distributed.DistBackendError("NCCL error: Cuda failure 2: CUDA out of memory"),
    "a missing file": FileNotFoundError(errno.ENOENT, "Cannot allocate memory"),
}
"""Errors that only sound like it."""

CLASSES = {
    "torch's": torch.OutOfMemoryError("anything"),
    "Python's": MemoryError(),
    "the system's": OSError(errno.ENOMEM, "Cannot allocate memory"),
}


class Tight(nn.Module):
    """A layer that takes three rows and no more."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.layer, self.error = nn.Linear(3, 1).double(), error

    def forward(self, rows: Tensor) -> Tensor:
        if len(rows) > 3:
            raise self.error
        out: Tensor = self.layer(rows)[:, 0].square()
        return out


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    out: Tensor = model(rows)
    return out


ROWS = torch.randn(16, 3, generator=torch.Generator().manual_seed(5)).double()


@pytest.mark.parametrize("name", [*SHORT, *CLASSES])
def test_what_means_that_memory_ran_out_is_answered_by_smaller_micro_batches(name: str) -> None:
    error = CLASSES.get(name) or RuntimeError(SHORT[name])
    assert is_out_of_memory(error)
    model = Tight(error)
    reference = whole_batch(model.layer, lambda layer, rows: layer(rows).square().mean(), ROWS)
    result = wb.backward(model, loss, ROWS, wb.Auto(8))
    assert result.micro_batches > 2
    assert_same_gradient(model.layer, reference)


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_sounds_like_it_is_passed_on(name: str) -> None:
    error = UNLIKE[name]
    assert not is_out_of_memory(error)
    model = Tight(error)
    model.layer.weight.grad = torch.ones_like(model.layer.weight)
    with pytest.raises(type(error)) as caught:
        wb.backward(model, loss, ROWS, wb.Auto(8))
    assert caught.value is error
    assert torch.equal(model.layer.weight.grad, torch.ones_like(model.layer.weight))
