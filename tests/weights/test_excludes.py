"""Names in every spelling; the two namespaces of exclusion patterns."""

import pytest

from qwen35.errors import CheckpointError
from qwen35.weights.excludes import Excludes, PatternSet, refuse_clash
from qwen35.weights.names import Layout, Part, spellings, split_root

GATE = "layers.0.mlp.gate"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.language_model.layers.0.mlp.gate", (Part.TARGET, GATE)),
        ("language_model.model.layers.0.mlp.gate", (Part.TARGET, GATE)),
        ("language_model.layers.0.mlp.gate", (Part.TARGET, GATE)),
        ("model.layers.0.mlp.gate", (Part.TARGET, GATE)),
        ("lm_head.weight", (Part.TARGET, "lm_head.weight")),
        ("language_model.lm_head", (Part.TARGET, "lm_head")),
        ("mtp.layers.0.mlp.gate", (Part.DRAFT, GATE)),
        ("model.mtp.layers.0.mlp.gate", (Part.DRAFT, GATE)),
        ("model.language_model.mtp.fc", (Part.DRAFT, "fc")),
        ("model.visual.blocks.0.attn.qkv", (Part.VISION, "blocks.0.attn.qkv")),
        ("visual.pos_embed", (Part.VISION, "pos_embed")),
        ("layers.0.mlp.gate", None),
        ("lm_heads", None),
    ],
)
def test_split_root(name: str, expected: tuple | None) -> None:
    assert split_root(name) == expected


def test_spellings_keep_target_and_draft_apart() -> None:
    target = spellings("model.layers.0.mlp.gate")
    assert target[0] == "model.layers.0.mlp.gate" and "model.language_model.layers.0.mlp.gate" in target
    draft = spellings("mtp.layers.0.mlp.gate")
    assert all("mtp." in form for form in draft)
    assert not set(target) & set(draft)
    assert set(spellings("lm_head")) == {
        "lm_head", "language_model.lm_head", "model.lm_head", "model.language_model.lm_head",
    }  # fmt: skip
    assert spellings("unknown.thing") == ("unknown.thing",)


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (
            [
                "model.language_model.embed_tokens.weight",
                "model.visual.pos_embed.weight",
                "mtp.fc.weight",
                "lm_head.weight",
            ],
            Layout("model.language_model.", "mtp.", "model.visual.", "lm_head"),
        ),
        (
            ["language_model.model.norm.weight", "visual.pos_embed.weight", "language_model.lm_head.weight"],
            Layout("language_model.model.", "mtp.", "visual.", "language_model.lm_head"),
        ),
        (["model.norm.weight", "model.mtp.fc.weight"], Layout("model.", "model.mtp.", "model.visual.", "lm_head")),
        ([], Layout("model.language_model.", "mtp.", "model.visual.", "lm_head")),
    ],
)
def test_layout(names: list[str], layout: Layout) -> None:
    assert Layout.of(names) == layout


@pytest.mark.parametrize(
    ("pattern", "module", "matches"),
    [
        ("model.visual*", "model.visual.blocks.0.attn.qkv", True),
        ("model.visual", "model.visual.blocks.0.attn.qkv", True),
        ("model.vis", "model.visual.blocks.0.attn.qkv", False),
        ("*linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_a", True),
        ("*.mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("model.layers.?.mlp.gate", "model.layers.3.mlp.gate", True),
        ("model.layers.[12].mlp.gate", "model.layers.3.mlp.gate", False),
        ("MODEL.visual*", "model.visual.norm", False),
        ("model.layers.1", "model.layers.10.mlp.gate", False),
    ],
)
def test_pattern(pattern: str, module: str, matches: bool) -> None:
    assert PatternSet((pattern,)).match(module) is matches


SPELLED = ("model.language_model.", "language_model.model.", "language_model.", "model.")


@pytest.mark.parametrize("written", SPELLED)
@pytest.mark.parametrize("on_disk", SPELLED)
def test_excludes_match_in_every_spelling(written: str, on_disk: str) -> None:
    excludes = Excludes.parse([f"{written}layers.0.mlp.gate", f"{written}layers.1.linear_attn*", "visual.*", "lm_head"])
    assert excludes.exclude(f"{on_disk}layers.0.mlp.gate")
    assert excludes.exclude(f"{on_disk}layers.1.linear_attn.in_proj_qkv")
    assert not excludes.exclude(f"{on_disk}layers.1.mlp.gate")
    assert not excludes.exclude("mtp.layers.0.mlp.gate")
    assert excludes.exclude("model.visual.merger.norm") and excludes.exclude("visual.merger.norm")
    assert excludes.exclude("language_model.lm_head")


@pytest.mark.parametrize("pattern", ["mtp*", "mtp.layers.0*", "model.mtp.layers.0*", "model.language_model.mtp*"])
@pytest.mark.parametrize("on_disk", ["mtp.", "model.mtp.", "model.language_model.mtp."])
def test_draft_patterns_match_the_draft_alone(pattern: str, on_disk: str) -> None:
    excludes = Excludes.parse([pattern], ["model.layers.0.mlp.gate", "model.language_model.layers.0.mlp.gate"])
    assert excludes.exclude(f"{on_disk}layers.0.mlp.gate")
    for root in SPELLED:
        assert not excludes.exclude(f"{root}layers.0.mlp.gate")


def test_target_patterns_leave_the_draft_of_the_same_number_alone() -> None:
    excludes = Excludes.parse(["model.layers.0*", "model.language_model.layers.0*"])
    assert excludes.exclude("model.language_model.layers.0.self_attn.q_proj")
    assert not excludes.exclude("mtp.layers.0.self_attn.q_proj")
    assert not excludes.exclude("model.mtp.layers.0.self_attn.q_proj")


def test_patterns_without_a_root_mean_every_part() -> None:
    excludes = Excludes.parse(["*mlp.gate"])
    assert excludes.exclude("mtp.layers.0.mlp.gate") and excludes.exclude("model.layers.7.mlp.gate")


@pytest.mark.parametrize(
    ("patterns", "module"),
    [
        (["mtp*"], "mtp_base.layers.0.mlp.gate"),  # a target whose own prefix begins like the draft's
        (["model.mtp*"], "model.mtp_adapter"),
        (["mtp.layers.0*", "mtp[!.]*"], "mtp2.layers.0.mlp.gate"),
    ],
)
def test_a_draft_pattern_that_reaches_the_target_is_refused(patterns: list[str], module: str) -> None:
    with pytest.raises(CheckpointError, match="expected to reach the draft alone, but it also excludes"):
        Excludes.parse(patterns, ["model.layers.0.mlp.gate", module])
    Excludes.parse(["mtp.*"], ["model.layers.0.mlp.gate", module])


def test_a_pattern_meant_for_the_draft_but_named_as_the_target_is_refused() -> None:
    """`mtp.layers.0*` renamed the way some engines do: it would exclude layer 0 of the target."""
    with pytest.raises(CheckpointError, match=r"'model.layers.0\*'.*'model.language_model.layers.0.mlp.gate'"):
        refuse_clash(["model.layers.0*"], ["model.language_model.layers.0.mlp.gate"])
