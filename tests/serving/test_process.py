import json
import os
import subprocess
import sys

import pytest

from qwen35.errors import ConfigError, StateError
from qwen35.serving.process import prepare_process, settings_of


def args_with(**parameters):
    config = {"parameters": {name: {"string_value": value} for name, value in parameters.items()}}
    return {"model_config": json.dumps(config), "model_repository": "/models/llm"}


def test_environment_goes_before_config_before_defaults():
    settings = settings_of(args_with(num_slots="4", block_tokens="8"), {"QWEN35_NUM_SLOTS": "2"})
    assert (settings.num_slots, settings.block_tokens, settings.num_draft_tokens) == (2, 8, 3)


@pytest.mark.parametrize(
    ("checkpoint", "resolved"),
    [("llm/1/checkpoint", "/models/llm/1/checkpoint"), ("/data/x", "/data/x"), ("../y", "/y")],
)
def test_a_relative_checkpoint_starts_at_the_repositorys_root(checkpoint, resolved):
    assert settings_of(args_with(checkpoint=checkpoint), {}).checkpoint == resolved


def test_an_unknown_parameter_is_refused_by_name():
    with pytest.raises(ConfigError, match="num_slotz"):
        settings_of(args_with(num_slotz="4"), {})


def test_the_arena_is_named_after_the_server():
    name = settings_of(args_with(), {}).arena_name
    assert name.startswith(f"qwen35-{os.getppid()}-")
    assert settings_of(args_with(), {"QWEN35_ARENA_NAME": "mine"}).arena_name == "mine"


def test_a_stub_without_a_server_names_no_arena(any_parent_is_a_server):
    with pytest.raises(StateError, match="expected tritonserver as the parent"):
        any_parent_is_a_server()


def test_streams_are_utf8_after_prepare_process(capfd):
    prepare_process()
    print("größer", file=sys.stdout)
    assert "größer" in capfd.readouterr().out


def test_what_a_load_says_reaches_the_standard_error_of_a_stub():
    """In a process of its own: the tests' runner has handlers already."""
    code = (
        "import logging; from qwen35.serving.process import prepare_process; prepare_process();"
        "logging.getLogger('qwen35.weights.loader').info('summary');"
        "logging.getLogger('elsewhere').info('chatter')"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stderr == "INFO qwen35.weights.loader: summary\n"
