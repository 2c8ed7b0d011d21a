"""Bytes and ownership of the caches: arena, blocks, slots, extents, leases. Knows neither mathematics nor Triton."""
