"""Which settings are refused, by name."""

import pytest

from qwen35.errors import ConfigError
from qwen35.settings import Settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, value) for name in ("request_timeout_seconds", "unclaimed_lease_seconds", "heartbeat_seconds")
          for value in ("0", "-1", "inf", "nan")],
        *[(name, value) for name in ("kv_cache_bytes", "max_image_bytes", "max_image_pixels") for value in ("0", "-5")],
        ("max_context_tokens", "-1"),
        ("image_cache_bytes", "-1"),
        ("swap_bytes", "-1"),
        ("session_directory", "sessions"),
        ("session_bytes", "0"),
        ("num_slots", "0"),
        ("num_draft_tokens", "17"),
        ("kernels", "gpu"),
        ("num_threads", "two"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(name, value):
    with pytest.raises(ConfigError, match=f"{name}: expected "):
        Settings.resolve({name: value}, {})


def test_zero_means_none_where_it_is_allowed():
    names = ("max_context_tokens", "image_cache_bytes", "swap_bytes", "num_draft_tokens")
    settings = Settings.resolve(dict.fromkeys(names, "0"), {})
    assert [getattr(settings, name) for name in names] == [0] * 4
