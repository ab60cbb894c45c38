"""Whole numbers as users give them: Python's, NumPy's, and no bools."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def whole(x: Any) -> int | None:
    """A whole number as an int; None for anything else, floats, bools and traced values included."""
    if isinstance(x, (bool, np.bool_)):
        return None
    try:
        return operator.index(x)
    except Exception:  # a TypeError, or what JAX raises for a traced value
        return None
