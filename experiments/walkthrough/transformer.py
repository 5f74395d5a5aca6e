"""The Transformer of 2017: its block, its three attentions, its size."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import jattn
from experiments.walkthrough.diagrams import transformer_blocks
from experiments.walkthrough.documents import MECHANISMS
from experiments.walkthrough.step import check, draw, same, step
from jattn import masks, viz


def parameter_shapes(build: Callable[[], nnx.Module]) -> list[tuple[int, ...]]:
    """Returns the shapes of a module's parameters."""
    # eval_shape runs the function for shapes alone: no parameter is made or takes memory.
    model = nnx.eval_shape(build)
    # The parameters of the module, and those of its parts and of their parts, in one list.
    return [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


def base() -> jattn.nn.Transformer:
    """Builds the paper's base model: 37,000 word pieces, one table of vectors for all uses."""
    return jattn.nn.Transformer(
        37000,
        37000,
        features=512,
        num_heads=8,
        feed_forward=2048,
        encoder_layers=6,
        decoder_layers=6,
        tie_embeddings="all",
        rngs=nnx.Rngs(0),
    )


def weights_of_a_block(seen: dict[str, jax.Array]) -> list[Figure]:
    """The weights of the first blocks: of the encoder, of the decoder, and between the two."""
    words = [f"source {n}" for n in range(1, 5)] + 2 * ["padding"]
    written = [f"target {n}" for n in range(1, 6)]
    # Rows of the padding are left out.
    labels = ("encoder", "self", words[:4], words), ("decoder", "self", written, written)
    grids = []
    for side, kind, rows, columns in (*labels, ("decoder", "cross", written, words)):
        weights = np.asarray(seen[f"{side}/layers/0/{kind}_attention"])[0, :, : len(rows)]
        grids.append(viz.grid(weights, rows, columns, title=f"{side}, {kind}-attention, block 1"))
    return grids


def encoder_block_is_a_loop() -> None:
    """Checks that a block of the encoder is attention and feed-forward, each with its residual
    connection and normalisation."""
    block = jattn.nn.EncoderLayer(
        features=32, num_heads=4, feed_forward=64, dropout_rate=0.0, rngs=nnx.Rngs(0)
    )
    # The modules compute in 32 bits.
    x = jax.random.normal(jax.random.key(1), (1, 6, 32), jnp.float32)
    # The two parts of the block, each with its normalisation.
    parts = block.self_attention, block.feed_forward
    norms = block.self_attention_residual.norm, block.feed_forward_residual.norm
    y = x
    for part, norm in zip(parts, norms, strict=True):
        y = norm(y + part(y))
    check("a block of the encoder is this loop", same(block(x), y, 1e-5))


@step(
    MECHANISMS,
    uses=(parameter_shapes, base, weights_of_a_block, encoder_block_is_a_loop),
    diagram=transformer_blocks(),
    misprints=(
        "Misprint in “Mechanisms”: it lets the decoder get “key and query values” from the "
        "encoder. Keys and values are meant.",
    ),
)
def transformer() -> None:
    """The encoder-decoder of 2017.

    The encoder reads the source. Each of its blocks has two parts: attention of the sentence to
    itself, and a small network for each word alone, called feed-forward. Around each part are a
    residual connection and a normalisation.

        y = norm(x + attention(x))
        z = norm(y + f(y))
        f(y) = max(0, y W_1 + b_1) W_2 + b_2

    The decoder writes the target. Its blocks have a third part between the two, cross-attention:
    queries come from the target, keys and values from what the encoder made of the source. The
    decoder's self-attention is causal. So all words of a target can be trained at once, each as if
    the later ones were not yet written.

    The paper's base model has six blocks in the encoder and six in the decoder, a width of 512, 8
    heads of 64, and an inner width of 2,048. One table of about 37,000 word pieces serves for both
    languages and for the output. The paper gives it 65 million parameters. With exactly 37,000
    pieces it has 63.1 million; about 3,700 more pieces would make the difference.

    In the pictures a row is a word that attends, and a column is a word that it attends to. The
    model is not trained, so the weights mean nothing yet.
    """
    encoder_block_is_a_loop()
    # 50 words in the source language, 60 in the target language.
    sizes: dict[str, Any] = {"features": 32, "num_heads": 4, "feed_forward": 64}
    sizes |= {"encoder_layers": 2, "decoder_layers": 2}
    model = jattn.nn.Transformer(50, 60, **sizes, dropout_rate=0.0, rngs=nnx.Rngs(0))
    # One sentence of four words, filled up to six with 0, and one of five.
    source, target = jnp.array([[5, 9, 2, 7, 0, 0]]), jnp.array([[1, 8, 3, 4, 6]])
    # No word may attend to the padding: neither those of the source nor those of the target.
    real = masks.Lengths(kv=jnp.array([4]))
    padding: dict[str, Any] = {"source_mask": real, "cross_mask": real}
    logits = model(source, target, **padding)
    print(f"logits [B, T, words] = {list(logits.shape)}: how well each word fits at each place")
    later = model(source, target.at[0, 3:].set(0), **padding)
    check("later words change nothing before them", same(later[:, :3], logits[:, :3], 1e-5))
    check("they do change the later logits", not same(later[:, 3:], logits[:, 3:], 1e-2))
    padded = model(source.at[0, 4:].set(11), target, **padding)
    check("other numbers in the padding change nothing", same(padded, logits, 0))

    # The weights of every attention of the model, by its name: [B, N, T, S].
    seen = jattn.nn.capture_weights(model, source, target, **padding)
    for path, weights in seen.items():
        print(f"    {path:36}{list(weights.shape)}")
    sources = [weights[..., 4:] for path, weights in seen.items() if weights.shape[-1] == 6]
    check("the weights of the padding are 0", [np.all(weights == 0) for weights in sources])
    count = sum(math.prod(shape) for shape in parameter_shapes(base))
    print(f"the base model has {count / 1e6:.1f} million parameters")
    check("that is within 5 % of the paper's 65 million", abs(count / 65e6 - 1) < 0.05)
    # The picture.
    draw(*weights_of_a_block(seen))
