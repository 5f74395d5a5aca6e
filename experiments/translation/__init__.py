"""Translation with an attention encoder-decoder: data, training, evaluation, pictures."""
