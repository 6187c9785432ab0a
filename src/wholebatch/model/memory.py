"""What runs out of memory, what autograd saves, and where it waits."""

from __future__ import annotations

import errno
import gc
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from wholebatch.errors import WholeBatchError

BEGINS = r"(?:^|[:\].)] )"
NAMED = r"(?:CUDA|HIP|MPS|XPU|SYCL|NPU|MLU|MUSA|HPU|Triton)"
SAID = re.compile(
    "|".join(
        (
            # an allocator of torch's, a driver, a runtime: "CUDA out of memory.", "HIP error: out of memory"
            rf"{BEGINS}{NAMED}(?: backend| driver)?(?: error)?(?: \[\w+\])?:? +(?:code: \d+, \w+: )?out of memory\b",
            # a kernel library, by the name of its status: CUBLAS_STATUS_ALLOC_FAILED, CUFFT_ALLOC_FAILED
            r"\b(?-i:(?:CU|HIP|ROC|MI|ACL)[A-Z]*_[A-Z_]*ALLOC(?:ATION)?_FAILED)\b",
            r"\b(?:rocblas_status_memory_error|RESOURCE_EXHAUSTED: out of memory)\b",
            r"\b(?:CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|hipErrorMemoryAllocation)\b",
            r"\b(?:UR_RESULT|ZE_RESULT|PI|CL)_(?:ERROR_)?OUT_OF_(?:DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b",
            r"\bCL_MEM_OBJECT_ALLOCATION_FAILURE\b",
            # cuDNN and cuBLAS, where no room is left for a workspace or a handle
            r"\bUnable to find a valid cuDNN algorithm\b",
            r"\bGET was unable to find an engine to execute this computation\b",
            r"\bcuDNN error: CUDNN_STATUS_NOT_SUPPORTED\b",
            r"\b(?:CUBLAS|HIPBLAS)_STATUS_NOT_INITIALIZED when calling `(?:cublas|hipblas)(?:Lt)?Create\b",
            # the host
            r"\bDefaultCPUAllocator: (?:can't allocate|not enough) memory\b",
            rf"{BEGINS}(?:not enough memory|cannot allocate memory)\b",
            rf"{BEGINS}(?:failed|unable) to allocate (?:memory|buffer|workspace|\d)",
            r"\bstd::bad_alloc\b",
        )
    ),
    re.IGNORECASE | re.MULTILINE,
)
"""What runtime errors say that mean the same as ``torch.OutOfMemoryError`` (torch 2.6 to 2.14, and what it calls).

An error is known by the words of who raises it. Words that stand anywhere ("ran out of memory slots") are none: a
micro-batch would be cut down to one row for them.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out: torch's own class, Python's, or one that says so.

    Python's is that of the host, where NumPy, or a ``collate=`` function, asked for more than there was. The system's
    own is known by its number. What another rank said, or a collective that broke, is no shortage of this micro-batch.

    Example:
        >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
        True
        >>> is_out_of_memory(RuntimeError("shapes do not match"))
        False
    """
    if isinstance(error, (WholeBatchError, torch.distributed.DistError)):
        return False  # ours is final: one row alone did not fit, or another rank failed
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and SAID.search(str(error)) is not None


def too_few_rows(error: ValueError) -> bool:
    """Tell whether an error is torch's refusal to normalise a single value by itself, as BatchNorm would one row."""
    return str(error).startswith("Expected more than 1 value per channel when training")


def words_of(error: BaseException) -> str:
    """Return the first line of what an error says; its class, where it says nothing.

    Example:
        >>> words_of(MemoryError())
        'MemoryError.'
    """
    return str(error).split("\n", 1)[0] or f"{type(error).__name__}."


def release() -> None:
    """Give back what a failed micro-batch held: unreachable objects, and the allocator's cached blocks."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
    else:
        gc.collect(1)  # what frames and their errors hold is young; to look at all objects takes a tenth of a second


def peak_bytes(device: torch.device | None) -> int | None:
    """Read the most bytes a CUDA device has held at once; None elsewhere."""
    return torch.cuda.max_memory_allocated(device) if device is not None and device.type == "cuda" else None


def offloaded(model: nn.Module, offload: bool) -> AbstractContextManager[Any]:
    """Keep what autograd saves in host memory while it waits, except the model's own parameters.

    As ``torch.autograd.graph.save_on_cpu``, which would move parameters too. Pinned where there is a device.
    """
    return _OnHost(model) if offload else nullcontext()


class _OnHost(saved_tensors_hooks):
    def __init__(self, model: nn.Module) -> None:
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters() if not p.is_meta}

        def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
            stays = tensor.device.type == "cpu" or tensor.is_sparse
            if stays or tensor.untyped_storage().data_ptr() in parameters:
                return tensor.device, tensor.detach()
            packed = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
            packed.copy_(tensor)
            return tensor.device, packed

        def unpack(packed: tuple[torch.device, Tensor]) -> Tensor:
            device, tensor = packed
            return tensor.to(device, non_blocking=True)

        super().__init__(pack, unpack)


class SavedBytes(saved_tensors_hooks):
    """Count the bytes that autograd saves for the backward, and optionally limit them.

    Every storage counts once, however many tensors view it, from its first saving until its last use; parameters and
    what else is alive all the time can be left out. Over the limit, ``torch.OutOfMemoryError`` is raised where the
    bytes would have been saved: a machine without a GPU then behaves like one whose memory is that small.

    Args:
        limit: bytes; None counts only.
        ignored: tensors whose storage is not counted, such as the model's parameters.

    Example:
        >>> rows = torch.ones(4, 8, requires_grad=True)
        >>> with SavedBytes() as saved:
        ...     loss = rows.exp().sum()
        >>> saved.live
        128
    """

    def __init__(self, limit: int | None = None, ignored: Any = ()) -> None:
        self.limit, self.live, self.peak = limit, 0, 0
        self._ignored = {t.untyped_storage().data_ptr() for t in ignored if not t.is_meta}
        self._holders: dict[int, int] = {}
        super().__init__(self.pack, _Saved.tensor_of)

    def __enter__(self) -> SavedBytes:  # type: ignore[override]
        super().__enter__()
        return self

    def pack(self, tensor: Tensor) -> _Saved:
        """Count a tensor that is about to be saved.

        Raises:
            OutOfMemoryError: torch's, if it would pass the limit.
        """
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key in self._ignored or size == 0:
            return _Saved(tensor, None, 0)
        if key not in self._holders:
            self._admit(size)
        self._holders[key] = self._holders.get(key, 0) + 1
        return _Saved(tensor, self, key)

    def _admit(self, size: int) -> None:
        if self.limit is not None and self.live + size > self.limit:
            raise torch.OutOfMemoryError(
                f"Saving {size} bytes for the backward beside {self.live} would pass the limit of {self.limit} bytes."
            )
        self.live += size
        self.peak = max(self.peak, self.live)

    def forget(self, key: int, size: int) -> None:
        """Take note that one holder of a storage is gone."""
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= size


def counting_again() -> AbstractContextManager[Any]:
    """Let the `SavedBytes` now in force also see what a checkpoint saves when it runs its block a second time.

    ``torch.utils.checkpoint`` keeps those tensors itself, so that no hook of others sees them, until their last use:
    the memory of one whole block. Before torch 2.8 the hooks in force cannot be asked for, and nothing more is seen.
    """
    owner = getattr(_hooks_in_force()[0], "__self__", None)
    return _CountedAgain(owner) if isinstance(owner, SavedBytes) else nullcontext()


class _CountedAgain(saved_tensors_hooks):
    def __init__(self, watch: SavedBytes) -> None:
        self._watch = watch

    def __enter__(self) -> None:
        keep, give = _hooks_in_force()

        def pack(tensor: Tensor) -> Any:
            seen: Any = tensor.detach()
            seen.counted = self._watch.pack(tensor)  # lives as long as what is kept
            return keep(seen)

        super().__init__(pack, give)
        super().__enter__()


def _hooks_in_force() -> tuple[Any, Any]:
    ask = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)
    return ask(False) or (None, None)


class _Saved:
    """A saved tensor that says when it is no longer held."""

    __slots__ = ("_key", "_size", "_watch", "tensor")

    def __init__(self, tensor: Tensor, watch: SavedBytes | None, key: int) -> None:
        self._key, self._size = key, tensor.untyped_storage().nbytes()
        self._watch = watch
        self.tensor = tensor.detach()  # with its node, an output that is saved would hold the graph that holds it

    def __del__(self) -> None:
        watch = getattr(self, "_watch", None)  # none if memory ran out before it was whole
        if watch is not None:
            watch.forget(self._key, self._size)

    def tensor_of(self) -> Tensor:
        """Hand the tensor back to autograd."""
        return self.tensor
