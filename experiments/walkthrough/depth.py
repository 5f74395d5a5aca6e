"""What goes around attention: positions, residual connections and normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.documents import MECHANISMS
from experiments.walkthrough.similarity import INPUTS
from experiments.walkthrough.step import check, panels, same, show, step


@step(MECHANISMS)
def positions() -> Figure:
    """Sinusoidal positions.

    Attention is a mean over words and does not know their order: shuffle the words, and each gets
    the same vector as before. So each word's place is added to it as a vector of sines and cosines,
    quick ones and slow ones, much as the digits of a binary number change quickly and slowly.

    A pair of sine and cosine is the hand of a clock. To go k places on is to turn every hand by an
    angle that depends on k alone, a rotation. So a product of two such vectors depends on nothing
    but how far apart they are, and one matrix turns each place into the one k places on. Rotary
    positions turn queries and keys themselves.
    """
    x = jnp.asarray(INPUTS)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    plain, shuffled = (jattn.simple_self_attention(words) for words in (x, x[order]))
    check("shuffled words get the same vectors", same(shuffled, plain[order]))

    places = jattn.positions.sinusoidal(jnp.arange(64), 32, dtype=jnp.float64)  # [64, 32]
    show("the first three places, 6 of 32 numbers", places[:3, :6])
    k = 7
    angle = k * 10000.0 ** (-jnp.arange(0, 32, 2) / 32)  # by how much each hand turns
    sine, cosine = places[:-k, 0::2], places[:-k, 1::2]
    later_sine = sine * jnp.cos(angle) + cosine * jnp.sin(angle)
    later_cosine = cosine * jnp.cos(angle) - sine * jnp.sin(angle)
    turned = jnp.stack([later_sine, later_cosine], axis=-1).reshape(-1, 32)
    check("7 places on is a rotation, the same everywhere", same(turned, places[k:], 1e-10))
    products = places @ places.T
    spreads = [np.ptp(np.diagonal(products, distance)) for distance in range(64)]
    check("products depend on the distance alone", max(spreads) < 1e-10)
    check("and the place itself is the closest", products[0, 0] > products[0, 1:].max())

    q = jnp.tile(jax.random.normal(jax.random.key(0), (1, 1, 32)), (4, 1, 1))  # one vector, 4 times
    turned = jattn.positions.rotary(q, jnp.array([3, 10, 40, 47]))[:, 0]  # at these places
    near, far = turned[0] @ turned[1], turned[2] @ turned[3]
    check("rotary: 7 places apart give one product, at 3 as at 40", same(near, far, 1e-9))

    # The picture.
    figure, axes = panels(2, width=8.5, height=3.4)
    axes[0].imshow(places, cmap="PuOr_r", aspect="auto", vmin=-1, vmax=1)
    axes[0].set(title="the vectors of 64 places", xlabel="number", ylabel="place")
    axes[1].plot(products[32], label="of place 32")
    axes[1].plot(products[10], "--", label="of place 10")
    axes[1].set(title="product with every place", xlabel="place", ylim=(0, None))
    axes[1].legend()
    return figure


def layer(x: jax.Array, w: jax.Array, kind: str) -> jax.Array:
    """One of many equal layers: attention, bare or with what the Transformer puts around it."""
    if kind == "bare":
        return jattn.self_attention(x, w, w, w)  # one matrix for query, key and value
    y = jattn.self_attention(x if kind == "residual" else normalised(x), w, w, w)
    return x + y


def normalised(x: jax.Array) -> jax.Array:
    """Each row with mean 0 and standard deviation 1."""
    return (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)


@step(MECHANISMS, uses=(layer, normalised))
def residual_and_norm() -> Figure:
    """Residual connections and normalisation.

    Layers after one another multiply: what goes through n layers is multiplied by n matrices, the
    gradient on its way back as well. Powers of a number of size below 1 vanish, of one above 1
    explode; for powers of one matrix, the eigenvalue of the greatest size decides.

    A residual connection adds what goes in to what comes out, x + f(x): one way through the network
    has no factor at all. A normalisation gives each word mean 0 and standard deviation 1, so that
    sums of many layers keep one size. The 2017 paper normalises after adding (post-norm); most
    models since normalise before the layer (pre-norm), as here. Misprint in “Mechanisms”: a vector
    is written with its eigenvalues as its coefficients; they are other numbers.
    """
    eigenvalue = np.array([0.5, 1.0, 1.5])
    print(f"powers of {eigenvalue}: the 20th are {eigenvalue**20}")
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 32)))  # 8 words of 32 numbers
    probe = jnp.asarray(rng.normal(size=(8, 32)))
    depths, kinds = [1, 2, 4, 8, 16, 32], ("bare", "residual", "residual and norm")
    # A matrix for each layer; x @ w has about 0.8 times the length of x.
    w = jnp.asarray(rng.normal(size=(32, 32, 32)) * 0.8 / np.sqrt(32))

    def gradient(kind: str, depth: int) -> float:
        def through(x: jax.Array) -> jax.Array:
            for n in range(depth):
                x = layer(x, w[n], kind)
            return jnp.sum(probe * x)

        return float(jnp.linalg.norm(jax.grad(through)(x)))

    sizes = {kind: np.array([gradient(kind, depth) for depth in depths]) for kind in kinds}
    print(f"{'layers':20}" + "".join(f"{depth:10}" for depth in depths))
    for kind, values in sizes.items():
        print(f"{kind:20}" + "".join(f"{value:10.2g}" for value in values))
    bare, residual, both = sizes.values()
    check("bare, less than a hundredth of the gradient is left", bare[-1] < bare[0] / 100)
    check(
        "residual connections alone let it grow, by over a hundred",
        residual[-1] > 100 * residual[0],
    )
    check("with both it stays within a factor of 30", both.max() < 30 * both.min())

    stack = jattn.nn.Encoder(
        num_layers=6,
        features=32,
        num_heads=4,
        feed_forward=64,
        norm="post",
        dropout_rate=0.0,
        rngs=nnx.Rngs(0),
    )
    out = stack(x)  # six layers of the 2017 paper, which end in a normalisation
    centred = same(out.mean(axis=-1), np.zeros(8), 1e-5)
    check("before training, every word has mean 0 after post-norm", centred)
    check("and standard deviation 1", same(out.std(axis=-1), np.ones(8), 1e-3))
    # The picture.
    figure, axis = panels(1, width=6.5, height=3.6)
    for kind, style in zip(kinds, ("o-", "s--", "^:"), strict=True):
        axis.plot(depths, sizes[kind], style, label=kind)
    axis.set(xscale="log", yscale="log", xlabel="layers", title="gradient at the first layer")
    axis.set_xticks(depths, map(str, depths))
    axis.legend()
    return figure
