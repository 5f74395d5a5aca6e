"""PyTorch's `nn.Transformer` as a competitor in training; imported if torch is installed."""

import contextlib
import math
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

from experiments.translation.batches import Batch
from experiments.translation.presets import Config
from experiments.translation.vocabulary import PAD


class Translator(nn.Module):
    """`nn.Transformer` between embeddings with learned positions and a projection to logits."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        self.scale = math.sqrt(config.features)
        self.source, self.target = (nn.Embedding(vocabulary, config.features) for _ in "st")
        self.places = nn.ModuleList(nn.Embedding(config.max_length, config.features) for _ in "st")
        self.dropout = nn.Dropout(config.dropout_rate)
        self.transformer = nn.Transformer(
            config.features,
            config.num_heads,
            config.encoder_layers,
            config.decoder_layers,
            config.feed_forward,
            config.dropout_rate,
            batch_first=True,
        )
        self.output = nn.Linear(config.features, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        padding = source == PAD
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        x, y = (
            self.dropout(table(ids) * self.scale + places(torch.arange(ids.shape[1])))
            for table, places, ids in zip(
                (self.source, self.target), self.places, (source, target), strict=True
            )
        )
        features = self.transformer(
            x,
            y,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.output(features)


def serve(connection: Connection, config: Config, vocabulary: int, batch: Batch) -> None:
    """Makes a step with our loss, clipping and Adam for each message on the connection."""
    train_step = _step(config, vocabulary, batch)
    with contextlib.suppress(EOFError):  # the parent process has closed the connection
        while True:
            connection.recv()
            train_step()
            connection.send(None)


def _step(config: Config, vocabulary: int, batch: Batch) -> Callable[[], None]:
    source, decoder_input, labels = (
        torch.from_numpy(np.asarray(x)).long()
        for x in (batch.source, batch.target_in, batch.target_out)
    )
    model = Translator(config, vocabulary).train()
    betas = (0.9, config.beta2)
    adam = torch.optim.Adam(model.parameters(), config.learning_rate, betas, config.epsilon)
    loss = nn.CrossEntropyLoss(ignore_index=PAD, label_smoothing=config.label_smoothing)

    def train_step() -> None:
        adam.zero_grad()
        loss(model(source, decoder_input).flatten(0, 1), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        adam.step()

    return train_step
