"""Random checkpoints of true shape: published names, types and files, seeded values that keep activations sane.

    python -m build.synthetic --shape 344m --layout bf16 --output DIR
    python -m build.synthetic --shape 35b --layout nvfp4 --layers 4 --output DIR

They cannot talk, but they load, run and take the time that the real ones take.
"""
