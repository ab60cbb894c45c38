"""Checks of options that several functions take."""

from __future__ import annotations

from typing import Any

import numpy as np

from remat_kit._errors import OptionError


def check_flags(**flags: Any) -> None:
    """Refuses what is no bool: a text or a number in the wrong place would count as True.

    Raises:
      OptionError: naming the option.
    """
    for name, value in flags.items():
        if not isinstance(value, (bool, np.bool_)):
            raise OptionError(f"{name}= is True or False, got {value!r:.80}.")
