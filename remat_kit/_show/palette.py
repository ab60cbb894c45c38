"""One set of colours for every picture, by what they stand for.

They are those of Okabe and Ito (2008, https://jfly.uni-koeln.de/color/), which people with any common form of colour
blindness can tell apart, and stand out from white and from black.
"""

from __future__ import annotations

SAVED = "#0072b2"
OFFLOADED = "#e69f00"
RECOMPUTED = "#d55e00"
TEMPORARY = "#56b4e9"
ARGUMENTS = "#8a8a8a"
OUTPUTS = "#b4b4b4"
CONSTANTS = "#6a6a6a"
GOOD = "#009e73"
OTHER = "#cc79a7"

ACTIONS = {"saved": SAVED, "offloaded": OFFLOADED, "recomputed": RECOMPUTED}
CLASSES = {
    "arguments": ARGUMENTS,
    "outputs": OUTPUTS,
    "constants": CONSTANTS,
    "residuals": SAVED,
    "fetched": OFFLOADED,
    "recomputed": RECOMPUTED,
    "temporary": TEMPORARY,
}
SERIES = (SAVED, OFFLOADED, GOOD, OTHER, TEMPORARY, RECOMPUTED, "#c9b800")  # of things without a colour of their own
