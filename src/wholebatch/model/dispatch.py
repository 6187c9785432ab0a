"""What stands below autograd and sees every operator that runs, whoever calls it."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that operators of a higher order let through.

    Without ``supports_higher_order_operators`` torch refuses ``flex_attention``, ``torch.cond`` and the like under a
    mode, though what they are made of could be seen as well.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
