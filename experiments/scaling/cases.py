"""A call of attention over several devices: its sizes, program and work."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jattn import masks, parallel


SCHEMES = ("ring", "all_to_all", "gather")
ORDERS = ("zigzag", "contiguous")
DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ScalingCase:
    """Causal self-attention of one sequence. `window` limits the keys of a query, and `documents`
    is the average number of tokens of a document; None: no such limit."""

    scheme: str = "ring"
    devices: int = 8
    length: int = 8192
    heads: int = 8
    key_heads: int = 8
    head_size: int = 64
    window: int | None = None
    documents: int | None = None
    order: str = "zigzag"
    dtype: str = "float32"
    backward: bool = True

    @property
    def arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes and dtypes of query, key and value."""
        return tuple(
            jax.ShapeDtypeStruct((1, self.length, n, self.head_size), jnp.dtype(self.dtype))
            for n in (self.heads, self.key_heads, self.key_heads)
        )

    def mask(self, ids: Any = None) -> Any:
        """Returns the mask, with the documents' ids if there are any."""
        mask = masks.Causal()
        if self.window is not None:
            mask = mask & masks.Window(left=self.window - 1)
        return mask if ids is None else mask & masks.Segments(ids)

    def ids(self) -> np.ndarray:
        """Draws the document of each token, `[1, length]`, from a fixed seed."""
        assert self.documents is not None
        starts = np.random.default_rng(0).random(self.length) < 1 / self.documents
        ids = np.cumsum(starts, dtype=np.int32)[None]
        return parallel.shard_tokens(ids, self.devices, order=self.order)

    @property
    def pairs(self) -> float:
        """The number of query-key pairs that the causal mask and the window allow."""
        T, w = self.length, min(self.window or self.length, self.length)
        return w * (w + 1) / 2 + (T - w) * w

    @property
    def flops(self) -> float:
        """The operations of all devices' products: two forward and five backward, one
        recomputed."""
        return self.pairs * self.heads * self.head_size * 2 * (7 if self.backward else 2)

    def exchanges(self) -> tuple[parallel.Exchange, ...]:
        """Returns the call's exchanges, by formula."""
        ids = None if self.documents is None else self.ids()
        all_exchanges = parallel.exchanges(
            *self.arrays,
            devices=self.devices,
            scheme=self.scheme,  # pyright: ignore[reportArgumentType]
            order=self.order,  # pyright: ignore[reportArgumentType]
            mask=self.mask(ids),
        )
        return tuple(x for x in all_exchanges if self.backward or not x.backward)

    def function(self, mesh: Mesh) -> Any:
        """Returns a function of query, key, value and ids, if there are any. It returns the output
        or, with `backward`, the gradients of half the sum of the squared output."""

        def run(query: Any, key: Any, value: Any, ids: Any = None) -> Any:
            return parallel.attention(
                query,
                key,
                value,
                mesh=mesh,
                axis_name="x",
                scheme=self.scheme,  # pyright: ignore[reportArgumentType]
                order=self.order,  # pyright: ignore[reportArgumentType]
                mask=self.mask(ids),
            )

        def loss(*arrays: Any) -> Any:
            return jnp.sum(run(*arrays).astype(jnp.float32) ** 2) / 2

        return jax.grad(loss, (0, 1, 2)) if self.backward else run

    def compiled(self, devices: Any) -> Any:
        """Compiles the program for the first of the `devices`."""
        mesh = Mesh(np.array(devices[: self.devices]), ("x",))
        sharding = NamedSharding(mesh, P(None, "x"))
        avals = [*self.arrays]
        if self.documents is not None:
            avals.append(jax.ShapeDtypeStruct((1, self.length), jnp.int32))
        avals = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in avals]
        return jax.jit(self.function(mesh)).lower(*avals).compile()

    def inputs(self, devices: Any) -> list[Any]:
        """Draws the program's arguments, sharded over the devices."""
        sharding = NamedSharding(Mesh(np.array(devices[: self.devices]), ("x",)), P(None, "x"))
        keys = jax.random.split(jax.random.key(0), 3)
        arrays = [
            jax.jit(jax.random.normal, static_argnums=(1, 2), out_shardings=sharding)(
                key, x.shape, x.dtype
            )
            for key, x in zip(keys, self.arrays, strict=True)
        ]
        if self.documents is not None:
            arrays.append(jax.device_put(self.ids(), sharding))
        return arrays
