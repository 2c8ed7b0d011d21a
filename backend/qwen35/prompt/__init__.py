"""From what a client sends (text, chat messages, images, videos) to what the model reads: token ids, 3-axis positions
and image patches. Knows the checkpoint's tokenizer, template and preprocessor files; knows no engine and no server."""
