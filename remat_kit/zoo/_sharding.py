"""How a model lies on a mesh: parameters and data split over the devices, and constraints on activations.

Axes named ``model`` or ``tensor`` split heads and hidden units (Megatron-LM, Shoeybi et al., 2019); all others split
the batch and, besides, every parameter (ZeRO-3, Rajbhandari et al., 2020; FSDP), which XLA gathers where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from remat_kit.zoo._common import Check

TENSOR_AXES = ("model", "tensor")


@dataclass(frozen=True)
class Layout:
    """A mesh, whose axes are left to XLA's partitioner; or none, and everything is on one device."""

    mesh: Mesh | AbstractMesh | None = None

    @classmethod
    def on(cls, mesh: Any, check: Check, *, batch: int, abstract: bool) -> Layout:
        """Returns the layout on `mesh`; raises `RematError` where the mesh cannot hold the model's data."""
        if mesh is None:
            return cls()
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise check.error(f"mesh={mesh!r} is no mesh. Give a jax.sharding.Mesh or jax.sharding.AbstractMesh.")
        if isinstance(mesh, AbstractMesh) and not abstract:
            raise check.error("an AbstractMesh has no devices for arrays. Give a jax.sharding.Mesh, or abstract=True.")
        layout = cls(mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names)))
        check.divides(f"devices along {' and '.join(layout.data)}", layout.devices(layout.data), "batch", batch)
        return layout

    @property
    def data(self) -> tuple[str, ...]:
        """Axes that split the batch and the parameters."""
        return tuple(name for name in self._axes if name not in TENSOR_AXES)

    @property
    def tensor(self) -> tuple[str, ...]:
        """Axes that split heads and hidden units."""
        return tuple(name for name in self._axes if name in TENSOR_AXES)

    def devices(self, axes: tuple[str, ...]) -> int:
        """Returns the number of devices along `axes`."""
        return math.prod(self._axes[name] for name in axes)

    def split(self, x: jax.Array, *, tensor: int | None = None) -> jax.Array:
        """Constrains an activation: its first dimension over the data axes, dimension `tensor` over the tensor axes."""
        if self.mesh is None:
            return x
        return jax.lax.with_sharding_constraint(x, self._sharding(x.shape, {0: self.data, tensor: self.tensor}))

    def pin(self, params: Any, tensor_dims: Mapping[str, int]) -> Any:
        """Constrains parameters to the sharding that they have as arguments, and so their gradients, too."""
        if self.mesh is None:
            return params
        return jax.lax.with_sharding_constraint(params, self.parameters(params, tensor_dims))

    def parameters(self, params: Any, tensor_dims: Mapping[str, int]) -> Any:
        """Returns the sharding of every parameter.

        Args:
            params: nested dicts of arrays or `jax.ShapeDtypeStruct`s; those below ``layers`` are stacked.
            tensor_dims: name of a module -> dimension of its parameter, from the end, that the tensor axes split. The
                data axes split the largest of the others that divides, the layer's number excepted.
        """

        def of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            keys = [key.key for key in path]
            tensor = next((leaf.ndim + tensor_dims[key] for key in keys if key in tensor_dims), None)
            free = [i for i in range("layers" in keys, leaf.ndim) if i != tensor]
            fits = [i for i in free if leaf.shape[i] % self.devices(self.data) == 0]
            largest = max(fits, key=lambda i: leaf.shape[i], default=None)
            return self._sharding(leaf.shape, {largest: self.data, tensor: self.tensor})

        return jax.tree_util.tree_map_with_path(of, params)

    def arguments(self, args: tuple[Any, ...], tensor_dims: Mapping[str, int]) -> Any:
        """Returns the sharding of every leaf of ``(params, *data)``, or None without a mesh.

        The first dimension of data is the batch; `parameters` has the rest.
        """
        if self.mesh is None:
            return None
        params, *data = args
        of_data = jax.tree.map(lambda leaf: self._sharding(leaf.shape, {0: self.data}), data)
        return self.parameters(params, tensor_dims), *of_data

    @property
    def _axes(self) -> Mapping[str, int]:
        return {} if self.mesh is None else self.mesh.shape

    def _sharding(self, shape: tuple[int, ...], axes: Mapping[int | None, tuple[str, ...]]) -> NamedSharding:
        """Dimension -> mesh axes; a dimension that does not divide is not split."""
        assert self.mesh is not None
        found = {i % len(shape): names for i, names in axes.items() if i is not None}
        fitting = {i: names for i, names in found.items() if names and shape[i] % self.devices(names) == 0}
        return NamedSharding(self.mesh, PartitionSpec(*(fitting.get(i) for i in range(len(shape)))))
