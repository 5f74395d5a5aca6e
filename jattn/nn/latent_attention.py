"""`MultiHeadLatentAttention`: keys and values of all heads from one short vector for each token."""

from collections.abc import Callable
from typing import Any, Unpack

import jax.numpy as jnp
from flax import nnx
from flax.typing import Dtype, Initializer, PrecisionLike
from jaxtyping import Array, Float

from jattn._advice import CONSTRUCTOR_ADVICE
from jattn._advised import advised_by
from jattn._explicit import typed_like
from jattn._types import Keys, Queries, Values
from jattn.cache import Cache, DenseCache, LatentCache
from jattn.cache.base import CacheOptions
from jattn.checks import check_size
from jattn.masks import MaskLike
from jattn.nn._types import CallOptions, Positions, Valid
from jattn.nn.attention import MultiHeadAttention
from jattn.nn.embedding import AxialRotary, Rotary
from jattn.nn.layers import LECUN, ZEROS, RMSNorm, promote
from jattn.nn.module import check_features
from jattn.nn.variables import LearnedScore
from jattn.normalizers import NormalizerLike
from jattn.scores import ScoreLike


class MultiHeadLatentAttention(MultiHeadAttention):
    """Multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1 and appendix C).

    The keys U c and the values W c of all heads come from one latent vector c for each token. To
    each key is appended a rotated part r, which all heads share, and to each query a rotated part
    p. With a cache, which holds c and r alone, queries and outputs are multiplied by U and W in
    place of the keys and values:

        q · (U c) + p · r = [Uᵀ q, p] · [c, r],        Σ weight · (W c) = W Σ weight · c

    The parameters are the kernels `query_down` `[D, query_rank]`, `query` `[query_rank, N, H + R]`,
    `latent` `[E, C + R]`, `key` `[C, N, H]`, `value` `[C, N, V]` and `out` `[N, V, out_features]`,
    and the scales of the RMS norms `query_ln` and `latent_ln`. Without `query_rank` there is no
    `query_down` and no `query_ln`, and `query` is `[D, N, H + R]`.

    Args:
        num_heads: N.
        in_features, out_features, in_kv_features: as in `MultiHeadAttention`.
        kv_rank: C, the size of the latent vectors; default 4·H, as in the paper.
        query_rank: the size of the vectors from which queries are made; default None.
        head_dim: H, the size of the part of a key that is not rotated; default in_features / N.
        rotary_dim: R, the size of the rotated part; default H / 2, as in the paper.
        value_dim: V; default H.
        scale: the factor of query·key; default 1/√(H + R). A model that was extended by `Yarn`
            may have another one.
        use_bias: whether `query_down`, `latent` and `out` have biases. The others have none.
        rotary: the `Rotary` that rotates queries and keys; False leaves their last R numbers
            unrotated.

    The further arguments and the errors are those of `MultiHeadAttention`.

    >>> layer = nn.MultiHeadLatentAttention(2, 8, kv_rank=6, mask=masks.Causal(), rngs=nnx.Rngs(0))
    >>> out, cache = layer(jnp.ones((2, 5, 8)), cache=layer.empty_cache(2, 16))
    >>> out.shape, cache.keys.shape                          # C + R = 8
    ((2, 5, 8), (2, 1, 16, 8))
    """

    @advised_by(CONSTRUCTOR_ADVICE)
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        out_features: int | None = None,
        in_kv_features: int | None = None,
        *,
        kv_rank: int | None = None,
        query_rank: int | None = None,
        head_dim: int | None = None,
        rotary_dim: int | None = None,
        value_dim: int | None = None,
        scale: float | None = None,
        sinks: bool = False,
        dropout_rate: float = 0.0,
        use_bias: bool = True,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = LECUN,
        bias_init: Initializer = ZEROS,
        rotary: Rotary | AxialRotary | bool = True,
        mask: MaskLike = None,
        score: ScoreLike | LearnedScore = None,
        normalizer: NormalizerLike = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.kv_rank: Any = kv_rank
        self.rotary_dim: Any = rotary_dim
        self.query_rank = query_rank
        super().__init__(
            num_heads,
            in_features,
            None,
            out_features,
            None,
            in_kv_features,
            head_dim=head_dim,
            value_dim=value_dim,
            scale=scale,
            sinks=sinks,
            dropout_rate=dropout_rate,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            bias_init=bias_init,
            rotary=rotary,
            mask=mask,
            score=score,
            normalizer=normalizer,
            implementation=implementation,
            rngs=rngs,
        )

    def _make_projections(self, make: Callable[..., Any], rngs: nnx.Rngs) -> None:
        N, H, V = self.num_heads, self.head_dim, self.value_dim
        self.kv_rank = C = 4 * H if self.kv_rank is None else self.kv_rank
        self.rotary_dim = R = H // 2 if self.rotary_dim is None else self.rotary_dim
        check_size("kv_rank", C)
        check_size("rotary_dim", R, 0)
        if self.rotary is not None and R % 2:
            raise ValueError(f"rotary_dim: expected an even number of rotated channels, got {R}")
        self.scale = (H + R) ** -0.5 if self.scale is None else self.scale
        norm: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype, "rngs": rngs}
        heads = ("heads", "head_size")
        width, axis = self.in_features, "embed"
        query_down = query_ln = None
        if self.query_rank is not None:
            check_size("query_rank", self.query_rank)
            width, axis = self.query_rank, None
            query_down = make(self.in_features, width, ("embed", None))
            query_ln = RMSNorm(width, axis=None, **norm)
        self.query_down, self.query_ln = query_down, query_ln
        self.query = make(width, (N, H + R), (axis, *heads), use_bias=False)
        self.latent = make(self.in_kv_features, C + R, ("embed", None))
        self.latent_ln = RMSNorm(C, axis=None, **norm)
        self.key = make(C, (N, H), (None, *heads), use_bias=False)
        self.value = make(C, (N, V), (None, *heads), use_bias=False)

    def project_queries(
        self, inputs_q: Float[Array, "..."], positions: Positions = None
    ) -> Queries:
        """Returns the queries `[*B, T, N, H + R]`, whose last R numbers are rotated."""
        check_features("inputs_q", inputs_q, "T, D", "in_features", self.in_features)
        if self.query_down is not None and self.query_ln is not None:
            inputs_q = self.query_ln(self.query_down(inputs_q))
        return self._with_rotated_end(self.query(inputs_q), positions)

    def project_latents(self, inputs_k: Float[Array, "..."], positions: Positions = None) -> Keys:
        """Returns the normalised latent vectors, and after each of them the rotated part of its
        token's keys: `[*B, S, 1, C + R]`."""
        check_features("inputs_k", inputs_k, "S, E", "in_kv_features", self.in_kv_features)
        latent, shared = jnp.split(self.latent(inputs_k), [self.kv_rank], axis=-1)
        latents = jnp.concatenate(promote((self.latent_ln(latent), shared)), axis=-1)
        return self._with_rotated_end(latents[..., None, :], positions)

    def project_keys_values(
        self,
        inputs_k: Float[Array, "..."],
        inputs_v: Float[Array, "..."] | None = None,
        positions: Positions = None,
    ) -> tuple[Keys, Values]:
        """Returns the keys `[*B, S, N, H + R]` and values `[*B, S, N, V]` of all heads.

        `inputs_v` must be None, as both come from the same latent vectors."""
        if inputs_v is not None:
            raise ValueError(
                "inputs_v: expected None: keys and values come from the latent vectors of "
                "inputs_k, got an array"
            )
        latents = self.project_latents(inputs_k, positions)
        latent, shared = jnp.split(latents, [self.kv_rank], axis=-1)
        key, value = self.key(latent[..., 0, :]), self.value(latent[..., 0, :])
        shared = typed_like(jnp.broadcast_to(shared, (*key.shape[:-1], self.rotary_dim)), key)
        return jnp.concatenate(promote((key, shared)), axis=-1), value

    def _with_rotated_end(
        self, x: Float[Array, "*B T N H"], positions: Positions
    ) -> Float[Array, "*B T N H"]:
        """Rotates the last R numbers of each head."""
        if not self.rotary_dim:
            return x
        first, end = jnp.split(x, [x.shape[-1] - self.rotary_dim], axis=-1)
        end = self._normalised_and_rotated(end, None, positions)
        return jnp.concatenate([first, end], axis=-1)

    def empty_cache(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        batch: int,
        length: int,
        kind: type[Cache] = DenseCache,
        dtype: Dtype | None = None,
        **options: Unpack[CacheOptions],
    ) -> LatentCache:
        """Makes a cache of latent vectors for up to `length` tokens in each of `batch` rows.

        `kind` is the class of `jattn.cache` that stores them. The arguments are those of
        `MultiHeadAttention.empty_cache`.
        """
        sizes, dtype = (self.kv_rank, self.rotary_dim), self._cache_dtype(dtype)
        return LatentCache.create(batch, length, *sizes, dtype=dtype, kind=kind, **options)

    def _extend(
        self, inputs_q: Float[Array, "B T D"], cache: Any, valid: Valid, call: CallOptions
    ) -> tuple[Float[Array, "B T out"], Any]:
        if not isinstance(cache, LatentCache):
            raise TypeError(
                f"cache: expected a LatentCache, which `empty_cache` makes, got a "
                f"{type(cache).__name__}"
            )
        return super()._extend(inputs_q, cache, valid, call)

    def _project_step(
        self, inputs: Float[Array, "B T D"], positions: Positions
    ) -> tuple[Queries, Keys, None]:
        query = self.project_queries(inputs, positions)
        query, rotated = jnp.split(query, [self.head_dim], axis=-1)
        query = self._product("btnh,cnh->btnc", query, self.key)
        query = jnp.concatenate(promote((query, rotated)), axis=-1)
        return query, self.project_latents(inputs, positions), None

    def _step_heads(self, heads: Float[Array, "B T N _"]) -> Float[Array, "B T N _"]:
        return self._product("btnc,cnv->btnv", heads, self.value)

    def _product(self, axes: str, x: Array, projection: nnx.LinearGeneral) -> Array:
        """Multiplies `x` by a projection's kernel, along other axes than the projection does."""
        x, kernel = promote((x, projection.kernel[...]), dtype=self.dtype)
        return jnp.einsum(axes, x, kernel, precision=self.precision)
