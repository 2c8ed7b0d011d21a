"""Checkpoint directories in, typed weights out."""
