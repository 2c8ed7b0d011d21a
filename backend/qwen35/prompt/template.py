"""The checkpoint's chat template, rendered as transformers renders it, with content that can't forge control tokens.

A guard character is put behind the first character of everything in the messages, tools and template arguments that
is a special-token literal or could become the start of one when the template joins pieces ("<|im_" in one part,
"end|>" in the next). `Tokenizer.encode` then reads a guarded literal as plain text and removes the guards, so token
ids equal the unguarded template's wherever no content holds such a literal.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

from qwen35.errors import CheckpointError, InvalidArgument
from qwen35.prompt.tokenizer import Tokenizer, read_tokenizer_config

MAX_NESTING = 64
_GUARDS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # code points that are no characters
_GUARD_PATTERN = re.compile("[\ufdd0-\ufdef]")
_RESERVED = (
    "messages", "tools", "conversations", "documents", "chat_template", "continue_final_message",
    "return_assistant_tokens_mask",
)  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """A rendered chat. Literals of special tokens that came from content hold the character `guard`."""

    guarded_text: str
    guard: str

    @property
    def text(self) -> str:
        return self.guarded_text.replace(self.guard, "")


class ChatTemplate:
    """Thread-safe. `source` is the jinja text, `variables` the named special tokens that templates may print."""

    def __init__(self, source: str, special_tokens: Collection[str], variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._risky = _risky_pattern(special_tokens)

    @classmethod
    def from_directory(cls, directory: str | Path, tokenizer: Tokenizer) -> ChatTemplate | None:
        """chat_template.jinja, else the entry of tokenizer_config.json; None where the checkpoint has no template."""
        source = _find_source(Path(directory))
        return None if source is None else cls(source, tokenizer.special_tokens, tokenizer.template_variables)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """`messages` and `tools` are plain JSON values. The generation prompt is added unless
        `template_kwargs["add_generation_prompt"]` is false. Raises InvalidArgument with the template's own message."""
        kwargs = dict(template_kwargs or {})
        reserved = sorted(set(kwargs) & set(_RESERVED))
        if reserved:
            raise InvalidArgument(f"chat_template_kwargs: expected the template's own arguments, got {reserved[0]!r}")
        add_generation_prompt = kwargs.pop("add_generation_prompt", True)
        guard = _unused_character((messages, tools, kwargs))
        guarded_messages, guarded_tools, guarded_kwargs = (
            self._guard(value, guard) for value in (list(messages), tools, kwargs)
        )
        try:
            rendered, _ = render_jinja_template(
                conversations=[guarded_messages],
                tools=guarded_tools,
                chat_template=self.source,
                add_generation_prompt=add_generation_prompt,
                **{**self._variables, **guarded_kwargs},
            )
        except Exception as error:  # templates are programs: any type can come out of one that meets odd values
            detail = str(error).replace(guard, "")
            raise InvalidArgument(f"messages: the chat template refuses them: {detail}") from error
        return Rendered(rendered[0], guard)

    def _guard(self, value: Any, guard: str) -> Any:
        if isinstance(value, str):
            return self._risky.sub(lambda match: match[0] + guard, value) if self._risky else value
        if isinstance(value, Mapping):
            return {self._guard(key, guard): self._guard(item, guard) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._guard(item, guard) for item in value]
        return value


def check_json_value(name: str, value: Any, depth: int = 0) -> None:
    """Refuses what templates can't be given: other types than JSON's, lone surrogates, nesting beyond MAX_NESTING."""
    if depth > MAX_NESTING:
        raise InvalidArgument(f"{name}: expected at most {MAX_NESTING} nested levels, got more")
    if isinstance(value, str):
        check_text(name, value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgument.field(name, "strings as keys", key)
            check_text(name, key)
            check_json_value(f"{name}.{key}", item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_json_value(f"{name}[{index}]", item, depth + 1)
    elif not (value is None or isinstance(value, (bool, int, float))):
        raise InvalidArgument(f"{name}: expected a JSON value, got {type(value).__name__}")


def check_text(name: str, text: str) -> None:
    """Refuses lone surrogates, which JSON can carry ("\\ud800") and UTF-8 can't."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"{name}: expected valid Unicode text, got a lone surrogate at character {error.start}"
        ) from error


def _risky_pattern(special_tokens: Collection[str]) -> re.Pattern[str] | None:
    """First characters of special tokens, where a second one, white space (templates trim) or the end follows."""
    seconds: dict[str, set[str]] = {}
    for token in special_tokens:
        seconds.setdefault(token[0], set()).add(token[1:2])
    choices = []
    for first, follow in seconds.items():
        followed = "" if "" in follow else f"(?=[{''.join(map(re.escape, sorted(follow)))}]|\\s|\\Z)"
        choices.append(re.escape(first) + followed)
    return re.compile("|".join(choices)) if choices else None


def _unused_character(values: Any) -> str:
    present: set[str] = set()

    def collect(value: Any) -> None:
        if isinstance(value, str):
            present.update(_GUARD_PATTERN.findall(value))
        elif isinstance(value, Mapping):
            collect(list(value.items()))
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item)

    collect(values)
    for guard in _GUARDS:
        if guard not in present:
            return guard
    raise InvalidArgument(f"messages: expected text without all of the {len(_GUARDS)} non-characters U+FDD0 to U+FDEF")


def _find_source(directory: Path) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    entry = read_tokenizer_config(directory).get("chat_template")
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        if "default" not in named:
            raise CheckpointError(f"chat_template: expected one named 'default', got {', '.join(sorted(named))}")
        return named["default"]
    return entry
