"""Rows of plain data as a pandas DataFrame, where pandas is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from remat_kit._errors import RematError


def data_frame(rows: Iterable[Mapping[str, Any]]) -> Any:
    """Returns a DataFrame of the rows.

    Raises:
      RematError: when pandas is not installed.
    """
    try:
        import pandas as pd
    except ImportError:
        raise RematError("to_pandas() needs pandas, which is not installed: pip install pandas") from None
    return pd.DataFrame(list(rows))
