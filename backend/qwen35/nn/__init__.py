"""The mathematics of the model: tensors and state views in, tensors out."""
