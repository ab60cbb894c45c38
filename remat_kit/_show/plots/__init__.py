"""Pictures with matplotlib, one function a file: each draws one result into Axes and returns them.

Nothing global is touched: no settings of matplotlib, no `show`. Text and lines take the colours of the style in force.

Raises:
  RematError: when matplotlib is not installed.
"""

from remat_kit._errors import RematError

try:
    import matplotlib as _matplotlib  # noqa: F401
except ImportError:
    raise RematError("pictures need matplotlib, which is not installed: pip install 'remat-kit[plot]'") from None
