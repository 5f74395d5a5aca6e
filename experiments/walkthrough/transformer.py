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
from experiments.walkthrough.documents import CODING, LLMS, MECHANISMS
from experiments.walkthrough.step import check, same, step
from jattn import masks, viz


def parameter_shapes(build: Callable[[], nnx.Module]) -> list[tuple[int, ...]]:
    """The shapes of a module's parameters; the module is not made, so it takes no memory."""
    model = nnx.eval_shape(build)
    return [leaf.shape for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))]


@step(MECHANISMS, LLMS, CODING, uses=(parameter_shapes,))
def transformer() -> list[Figure]:
    """The encoder-decoder of 2017.

    A block of the encoder is attention of the sentence to itself, then a small network for each
    word alone; around both stand a residual connection and a normalisation. The decoder's block has
    a third part between: attention to what the encoder made of the source, where queries come from
    the target, keys and values from the source. The decoder's own attention is causal, so that all
    positions can be trained at once, each as if the rest were not yet written.

    Six blocks a side, a width of 512, 8 heads of 64, an inner width of 2,048, and one table of
    37,000 word pieces for both languages and for the output: the paper's base model, said to have
    65 million parameters.
    """
    sizes: dict[str, Any] = {"features": 32, "num_heads": 4, "feed_forward": 64}
    block = jattn.nn.EncoderLayer(**sizes, dropout_rate=0.0, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (1, 6, 32), jnp.float32)
    parts = block.self_attention, block.feed_forward
    norms = block.self_attention_residual.norm, block.feed_forward_residual.norm
    y = x
    for part, norm in zip(parts, norms, strict=True):
        y = norm(y + part(y))  # around each part: add, then normalise
    check("an encoder block is this loop", same(block(x), y, 1e-5))

    sizes |= {"encoder_layers": 2, "decoder_layers": 2}
    model = jattn.nn.Transformer(50, 60, **sizes, dropout_rate=0.0, rngs=nnx.Rngs(0))
    source, target = jnp.array([[5, 9, 2, 7, 0, 0]]), jnp.array([[1, 8, 3, 4, 6]])
    real = masks.Lengths(kv=jnp.array([4]))  # only the first 4 source words are real
    logits = model(source, target, source_mask=real, cross_mask=real)
    print(f"logits {logits.shape}: for each target word, a number for each word of the vocabulary")
    later = model(source, target.at[0, 3:].set(0), source_mask=real, cross_mask=real)
    before = same(later[:, :3], logits[:, :3], 1e-5)
    check("words that come later change nothing before them", before)
    check("but something after them", not same(later[:, 3:], logits[:, 3:], 1e-2))
    padded = model(source.at[0, 4:].set(11), target, source_mask=real, cross_mask=real)
    check("what stands in the padding changes nothing", same(padded, logits, 0))
    seen = jattn.nn.capture_weights(model, source, target, source_mask=real, cross_mask=real)
    for path, weights in seen.items():
        print(f"    {path:36}[B, N, T, S] = {list(weights.shape)}")

    paper: dict[str, Any] = {"features": 512, "num_heads": 8, "feed_forward": 2048}
    paper |= {"encoder_layers": 6, "decoder_layers": 6, "tie_embeddings": "all"}  # one table

    def base() -> jattn.nn.Transformer:
        return jattn.nn.Transformer(37000, 37000, **paper, rngs=nnx.Rngs(0))

    count = sum(math.prod(shape) for shape in parameter_shapes(base))
    print(f"the base model has {count / 1e6:.1f} million parameters")
    check("about the 65 million of the paper", abs(count / 65e6 - 1) < 0.05)
    # The pictures.
    grids = []
    for side, kind in (("encoder", "self"), ("decoder", "self"), ("decoder", "cross")):
        weights = np.asarray(seen[f"{side}/layers/0/{kind}_attention"])[0, :3]
        grids.append(viz.grid(weights, title=f"{side}, {kind}-attention: three heads"))
    return grids
