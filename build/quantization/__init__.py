"""Post-training quantisation of a checkpoint directory by ModelOpt on a CPU; `build.quantize` is the door."""
