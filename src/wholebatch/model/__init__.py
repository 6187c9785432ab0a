"""A model looked at: its modules, parameters, state, memory, and the gradients that are summed in it."""

from __future__ import annotations
