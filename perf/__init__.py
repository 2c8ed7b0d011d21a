"""Measurements of kernels, engine and server."""
