"""How fast a target is, as far as the planner asks: the roofline of one equation, and of a transfer to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from remat_kit._target.chips import Chip
from remat_kit._target.target import Target


@dataclasses.dataclass(frozen=True)
class Rates:
    """The limits of one device.

    Attributes:
      flops: FLOP/s of matrix products by dtype.
      bandwidth: bytes per second of its memory.
      host_bandwidth: bytes per second to or from the host's memory; 0 where offloading makes no sense.
      source: where the figures come from, in words.
      fuses_into_products: whether its compiler computes elementwise operands inside matrix products.
      fuses_copies: whether it computes an elementwise value anew in each of several readers.
    """

    flops: Callable[[str], float]
    bandwidth: float
    host_bandwidth: float
    source: str
    fuses_into_products: bool = False
    fuses_copies: bool = True

    @classmethod
    def of(cls, target: Target | None) -> Rates:
        """The rates of a target. Only ratios matter where a chip is not in the table."""
        if target is None:
            return cls(lambda dtype: 200e12, 1e12, 0.0, "a nominal accelerator of 200 FLOP per byte", True)
        if target.chip is not None:
            return cls._chip(target.chip)
        if target.platform == "cpu":
            return cls(lambda dtype: 100e9, 20e9, 0.0, "a nominal CPU core of 5 FLOP per byte", fuses_copies=False)
        return cls(lambda dtype: 200e12, 1e12, 0.0, "a nominal accelerator of 200 FLOP per byte", True)

    @classmethod
    def _chip(cls, chip: Chip) -> Rates:
        source = f"the roofline of {chip.title}"
        return cls(chip.peak, chip.bandwidth, chip.host_bandwidth, source, chip.platform == "tpu")
