"""Doors into other people's training loops; each imports its framework when it is opened, and not before."""

from __future__ import annotations
