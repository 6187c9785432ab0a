"""What a loss function is given in place of the model, and what it may not do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from wholebatch.batchnorm.model_call import ModelCall
from wholebatch.batchnorm.operations import arguments_of
from wholebatch.errors import InexactError


class ModelProxy:
    """The model in everything but its call, which somebody else answers.

    Not a module itself, so that ``parameters()``, ``state_dict()`` or ``isinstance`` are those of the model.

    Args:
        model: the model, or its wrapper, to which everything else goes.
        answer: what a call returns.
    """

    def __init__(self, model: nn.Module, answer: Callable[[ModelCall], Any]) -> None:
        object.__setattr__(self, "_model", model)
        object.__setattr__(self, "_answer", answer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hand the call over."""
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))):
            raise InexactError(
                "An input of the model requires a gradient, which would have to wait for all micro-batches. "
                "Call the model on plain data, or make what computes the input a part of the model."
            )
        return self._answer(ModelCall.of(args, kwargs))

    forward = __call__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._model[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._model)

    def __len__(self) -> int:
        return len(self._model)

    def __bool__(self) -> bool:
        return True

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._model)

    def __repr__(self) -> str:
        return repr(self._model)


class NothingElseMeets(TorchFunctionMode):
    """Refuse BatchNorm with batch statistics outside of the one call of the model."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at every operation that the loss function calls."""
        given = arguments_of(function, args, kwargs or {})
        if given is not None and given["training"]:
            raise InexactError(
                "The loss function reaches a BatchNorm layer in training mode outside of its one call of the model "
                "that it was given (a submodule, another method, another model), where only one micro-batch is at "
                "hand. Call model(...) itself, once, or put that layer into eval mode."
            )
        return function(*args, **(kwargs or {}))
