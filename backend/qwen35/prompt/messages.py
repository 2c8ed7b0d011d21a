"""Chat messages in OpenAI's form: checked, and taken apart into what the template reads and what the eye sees.

Every error names the path, as in ``messages[1].content[0].image_url.url: …``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from qwen35.errors import InvalidArgument
from qwen35.prompt.images import ImageSource
from qwen35.prompt.template import check_json_value
from qwen35.prompt.video import VideoSource

ROLES = ("system", "user", "assistant", "tool", "developer")
PART_TYPES = ("text", "image", "image_url", "video", "video_url")
Resolver: TypeAlias = Callable[[Any, str], ImageSource]  # (value of a part, its path) -> something to decode


@dataclass(frozen=True)
class Media:
    """An image or a video and the path under which it was sent."""

    name: str
    source: ImageSource | VideoSource


@dataclass(frozen=True)
class Chat:
    """Plain messages for the template, and the media in the order in which the template meets them."""

    messages: list[dict[str, Any]]
    images: list[Media]
    videos: list[Media]


def read_messages(messages: Any, resolve: Resolver) -> Chat:
    """Raises InvalidArgument for anything that isn't a chat. Keys without a value (null) are dropped."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise InvalidArgument.field("messages", "a list of at least one message", messages)
    chat = Chat([], [], [])
    for index, message in enumerate(messages):
        chat.messages.append(_read_message(message, f"messages[{index}]", chat, resolve))
    return chat


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A list of JSON objects, or None."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidArgument.field("tools", "a list of objects", tools)
    check_json_value("tools", tools)
    return [dict(tool) for tool in tools] or None


def read_template_kwargs(kwargs: Any) -> dict[str, Any]:
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise InvalidArgument.field("chat_template_kwargs", "an object", kwargs)
    check_json_value("chat_template_kwargs", kwargs)
    return dict(kwargs)


def _read_message(message: Any, path: str, chat: Chat, resolve: Resolver) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidArgument.field(path, "an object with role and content", message)
    fields = {name: value for name, value in message.items() if value is not None}
    role = fields.get("role")
    if role not in ROLES:
        raise InvalidArgument.field(f"{path}.role", f"one of {', '.join(ROLES)}", role)
    check_json_value(path, {name: value for name, value in fields.items() if name != "content"})
    if "tool_calls" in fields:
        fields["tool_calls"] = _read_tool_calls(fields["tool_calls"], f"{path}.tool_calls")
    if "content" not in fields:
        if role != "assistant":
            raise InvalidArgument(f"{path}.content: expected text or a list of parts, got nothing")
        return fields | {"content": ""}
    return fields | {"content": _read_content(fields["content"], f"{path}.content", chat, resolve)}


def _read_content(content: Any, path: str, chat: Chat, resolve: Resolver) -> Any:
    if isinstance(content, str):
        check_json_value(path, content)
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidArgument.field(path, "text or a list of parts", content)
    return [_read_part(part, f"{path}[{index}]", chat, resolve) for index, part in enumerate(content)]


def _read_part(part: Any, path: str, chat: Chat, resolve: Resolver) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidArgument.field(path, "an object with a type", part)
    kind = part.get("type")
    if kind not in PART_TYPES:
        raise InvalidArgument.field(f"{path}.type", f"one of {', '.join(PART_TYPES)}", kind)
    if kind == "text":
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidArgument.field(f"{path}.text", "text", text)
        check_json_value(f"{path}.text", text)
        return {"type": "text", "text": text}
    value, name = _media_value(part, kind, path)
    if kind.startswith("image"):
        chat.images.append(Media(name, resolve(value, name)))
        return {"type": "image"}
    chat.videos.append(Media(name, _read_video(part, value, name, path, resolve)))
    return {"type": "video"}


def _media_value(part: Mapping[str, Any], kind: str, path: str) -> tuple[Any, str]:
    """`image` and `video` hold the value itself, `image_url` and `video_url` hold it or an object with `url`."""
    if kind not in part:
        raise InvalidArgument(f"{path}.{kind}: expected the {kind.removesuffix('_url')}, got nothing")
    value, name = part[kind], f"{path}.{kind}"
    if kind.endswith("_url") and isinstance(value, Mapping):
        if "url" not in value:
            raise InvalidArgument(f"{name}.url: expected a data URI, got nothing")
        return value["url"], f"{name}.url"
    return value, name


def _read_video(part: Mapping[str, Any], value: Any, name: str, path: str, resolve: Resolver) -> VideoSource:
    fps, timestamps = part.get("fps"), part.get("timestamps")
    if fps is not None and not _is_number(fps):
        raise InvalidArgument.field(f"{path}.fps", "a positive number", fps)
    if timestamps is not None and not (isinstance(timestamps, (list, tuple)) and all(map(_is_number, timestamps))):
        raise InvalidArgument.field(f"{path}.timestamps", "a list of times in seconds", timestamps)
    if isinstance(value, (list, tuple)):
        return VideoSource([resolve(frame, f"{name}[{i}]") for i, frame in enumerate(value)], fps, timestamps)
    return VideoSource(resolve(value, name), fps, timestamps)


def _read_tool_calls(calls: Any, path: str) -> list[Any]:
    """OpenAI sends arguments as JSON text, templates want the object."""
    if not isinstance(calls, (list, tuple)):
        raise InvalidArgument.field(path, "a list of calls", calls)
    return [_read_tool_call(call, f"{path}[{index}]") for index, call in enumerate(calls)]


def _read_tool_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise InvalidArgument.field(path, "an object", call)
    function = call.get("function", call)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidArgument.field(f"{path}.function", "an object with name and arguments", function)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _parse_arguments(arguments, f"{path}.function.arguments")
    elif arguments is not None and not isinstance(arguments, Mapping):
        raise InvalidArgument.field(f"{path}.function.arguments", "an object or its JSON text", arguments)
    function = dict(function) | {"arguments": arguments or {}}
    return dict(call) | {"function": function} if "function" in call else function


def _parse_arguments(text: str, path: str) -> dict[str, Any]:
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InvalidArgument.field(path, "an object or its JSON text", text) from error
    if not isinstance(arguments, dict):
        raise InvalidArgument.field(path, "an object or its JSON text", text)
    check_json_value(path, arguments)
    return arguments


def _is_number(value: Any) -> bool:
    """Of seconds or of frames a second: finite, and far from where arithmetic overflows."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e9 <= value <= 1e9
