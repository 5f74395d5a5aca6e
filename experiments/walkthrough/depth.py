"""The parts around attention: positions, residual connections and normalisation."""

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.documents import MECHANISMS
from experiments.walkthrough.similarity import INPUTS
from experiments.walkthrough.step import check, draw, panels, same, show, step


def vectors_and_products(places: jax.Array, products: jax.Array) -> Figure:
    """The vectors of all places, and the products of two of them with all."""
    figure, axes = panels(2, width=8.5, height=3.4)
    image = axes[0].imshow(places, cmap="PuOr_r", aspect="auto", vmin=-1, vmax=1)
    axes[0].set(title="the vectors of 64 places", xlabel="number", ylabel="place")
    figure.colorbar(image, ax=axes[0])
    axes[1].plot(products[32], label="of place 32")
    axes[1].plot(products[10], "--", label="of place 10")
    axes[1].set(title="product with every place", xlabel="place", ylim=(0, None))
    axes[1].legend(loc="lower center")
    return figure


@step(MECHANISMS, uses=(vectors_and_products,))
def positions() -> None:
    """Sinusoidal positions.

    Attention gives each word a mean over words, and a mean does not depend on their order. If the
    words are shuffled, each still gets the same vector. So a vector that depends on its place p is
    added to each word. It has D numbers:

        z_(2i) = sin(p / 10000^(2i/D))
        z_(2i+1) = cos(p / 10000^(2i/D))

    The first numbers change quickly from place to place, and the last ones
    slowly, as the digits of a binary number do.

    Number 2i and number 2i + 1 are the two coordinates of the hand of a clock. One place further,
    this hand has turned by 10000^(−2i/D), wherever it was. So k places further, every hand has
    turned by an angle that depends on k alone. Therefore the dot product of two places depends only
    on their distance.

    Rotary positions turn the queries and keys themselves in this way, and nothing is added to the
    words. So each score depends on the distance of two words and not on their places, and the
    values do not depend on places at all.
    """
    x = jnp.asarray(INPUTS)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    plain, shuffled = (jattn.simple_self_attention(words) for words in (x, x[order]))
    check("shuffled words get the same vectors", same(shuffled, plain[order]))

    # 64 places, D = 32.
    places = jattn.positions.sinusoidal(jnp.arange(64), 32, dtype=jnp.float64)
    show("the first three places, 6 of 32 numbers", places[:3, :6])
    # The angle by which each hand turns from one place to the next.
    rate = 10000.0 ** (-jnp.arange(0, 32, 2) / 32)
    by_hand = jnp.sin(jnp.arange(64)[:, None] * rate), jnp.cos(jnp.arange(64)[:, None] * rate)
    sine, cosine = places[:, 0::2], places[:, 1::2]
    formula = [same(a, b, 1e-10) for a, b in zip((sine, cosine), by_hand, strict=True)]
    check("they are the formula above", formula)
    # Seven places further, each hand has turned by this angle.
    angle = 7 * rate
    later_sine = sine * jnp.cos(angle) + cosine * jnp.sin(angle)
    later_cosine = cosine * jnp.cos(angle) - sine * jnp.sin(angle)
    # Puts each sine and its cosine side by side again.
    turned = jnp.stack([later_sine, later_cosine], axis=-1).reshape(64, 32)
    check("one rotation leads 7 places on, from every place", same(turned[:-7], places[7:], 1e-10))
    products = places @ places.T
    spreads = [np.ptp(np.diagonal(products, distance)) for distance in range(64)]
    check("products depend on the distance alone", max(spreads) < 1e-10)
    check("the product is greatest for the distance 0", products[0, 0] > products[0, 1:].max())

    # One query, four times, at four places.
    q = jnp.tile(jax.random.normal(jax.random.key(0), (1, 1, 32)), (4, 1, 1))
    turned = jattn.positions.rotary(q, jnp.array([3, 10, 40, 47]))[:, 0]
    first, last = turned[0] @ turned[1], turned[2] @ turned[3]
    check("rotary: places 3 and 10 give the product of 40 and 47", same(first, last, 1e-9))
    other = turned[0] @ turned[2]
    check("rotary: places 3 and 40 give another product", not same(first, other, 1e-3))
    # The picture.
    draw(vectors_and_products(places, products))


def normalised(x: jax.Array) -> jax.Array:
    """Scales each row to mean 0 and standard deviation 1."""
    return (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)


def layer(x: jax.Array, w: jax.Array, kind: str) -> jax.Array:
    """Computes one layer: attention, bare or with a residual connection and normalisation."""
    # One matrix for queries, keys and values.
    y = jattn.self_attention(normalised(x) if kind == "pre-norm" else x, w, w, w)
    if kind == "bare":
        return y
    return normalised(x + y) if kind == "post-norm" else x + y


def gradients_by_depth(depths: list[int], gradients: dict[str, np.ndarray]) -> Figure:
    """The gradient for each number of layers, a line for each kind."""
    figure, axis = panels(1, width=6.5, height=3.6)
    for (kind, values), style in zip(gradients.items(), ("o-", "s--", "v-.", "^:"), strict=True):
        axis.plot(depths, values, style, label=kind)
    axis.set(
        xscale="log", yscale="log", xlabel="layers", title="gradient with respect to the input"
    )
    axis.set_xticks(depths, map(str, depths))
    axis.minorticks_off()
    axis.legend()
    return figure


@step(
    MECHANISMS,
    uses=(normalised, layer, gradients_by_depth),
    misprints=(
        "Misprint in “Mechanisms”: a vector is printed as x = Σ λ_i v_i, with the eigenvalues as "
        "its coefficients. The coefficients of x are other numbers.",
    ),
)
def residual_and_norm() -> None:
    """Residual connections and normalisation.

    Many layers multiply. What goes through n layers is multiplied by n matrices, and so is the
    gradient on its way back. The powers of a number between 0 and 1 vanish; the powers of a number
    above 1 explode. For the powers of one matrix, the eigenvalue of the greatest absolute value
    decides.

    A residual connection adds the input of a layer to its output: x + f(x). So one way through the
    network has no factor at all. But sums of many layers grow. A normalisation gives each word mean
    0 and standard deviation 1. The 2017 paper normalises the sum: this is called post-norm, and all
    sizes stay the same. Most models since then normalise what goes into the layer: this is
    pre-norm. There the sum still grows, but slowly.

        y = norm(x + f(x)) "(post-norm)"
        y = x + f(norm(x)) "(pre-norm)"

    The tables compare 1 to 32 layers, each with its own random matrix and without training: the
    standard deviation of what comes out, and the size of the gradient with respect to what goes in.
    """
    base = np.array([0.5, 1.0, 1.5])
    print(f"the 20th powers of {base}: {base**20}")
    rng = np.random.default_rng(0)
    # Eight words of 32 numbers, and a direction along which the output is measured.
    x, probe = (jnp.asarray(rng.normal(size=(8, 32))) for _ in range(2))
    # A matrix for each layer. A row times such a matrix has about 0.8 times its length.
    w = jnp.asarray(rng.normal(size=(32, 32, 32)) * 0.8 / np.sqrt(32))
    depths, kinds = [1, 2, 4, 8, 16, 32], ("bare", "residual", "post-norm", "pre-norm")

    def through(x: jax.Array, kind: str, depth: int) -> jax.Array:
        for n in range(depth):
            x = layer(x, w[n], kind)
        return x

    def along(x: jax.Array, kind: str, depth: int) -> jax.Array:
        return jnp.sum(probe * through(x, kind, depth))

    tables: dict[str, dict[str, np.ndarray]] = {"size": {}, "gradient": {}}
    for kind in kinds:
        out = [float(through(x, kind, depth).std()) for depth in depths]
        # The length of the gradient of `along` with respect to its first argument, x.
        back = [float(jnp.linalg.norm(jax.grad(along)(x, kind, depth))) for depth in depths]
        tables["size"][kind], tables["gradient"][kind] = np.array(out), np.array(back)
    for name, table in tables.items():
        print(f"{name:10}layers" + "".join(f"{depth:10}" for depth in depths))
        for kind, values in table.items():
            print(f"{kind:16}" + "".join(f"{value:10.2g}" for value in values))
    bare, residual, post, pre = tables["gradient"].values()
    check("bare, the gradient falls to less than a hundredth", bare[-1] < bare[0] / 100)
    check("residual, it grows more than a hundredfold", residual[-1] > 100 * residual[0])
    check("with post-norm, it changes by less than a factor of 5", post.max() < 5 * post.min())
    check("with pre-norm, by less than a factor of 10", pre.max() < 10 * pre.min())
    check("with post-norm, all sizes are 1", same(tables["size"]["post-norm"], np.ones(6)))
    # The picture.
    draw(gradients_by_depth(depths, tables["gradient"]))
