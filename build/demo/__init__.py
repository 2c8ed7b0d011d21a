"""The demo checkpoint: its tokenizer, data streams, training and evaluation."""
