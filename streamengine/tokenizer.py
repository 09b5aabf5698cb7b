"""Text and chat messages to token ids and back. The only importer of the tokenizer and template libraries.

Owns the chat template and which special tokens are added. Pure but for reading a model folder once.
Templates come with a model, so they are foreign code: they run in jinja2's immutable sandbox, and what
goes wrong inside is the request's fault, never the engine's.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamengine.errors import InvalidRequest, StartupError, UnsupportedFeature

Message = dict[str, str]
"""A chat message as templates see it: ``role`` and ``content``."""


class Tokenizer(Protocol):
    """What the engine needs of a vocabulary. Called from several threads at once."""

    vocab_size: int
    longest_token: int
    """Characters of text that one token covers at most: longer text needs more tokens."""

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with the special tokens that this vocabulary puts around a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens and ids outside the vocabulary have no text; broken characters are U+FFFD."""
        ...

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The template's ids for ``messages`` (of `read_messages`), up to where the assistant speaks.

        Raises:
            InvalidRequest: the template refuses them; its message is the error's.
        """
        ...


class FolderTokenizer:
    """A `Tokenizer` over ``tokenizer.json`` and a chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: "ChatTemplate | None") -> None:
        # A saved tokenizer may carry the truncation and padding of somebody's training run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self._template = template
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send prompt or token_ids", param="messages")
        # The template writes the special tokens itself.
        return self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids


def load_tokenizer(folder: str | Path) -> FolderTokenizer:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` (the latter two optional).

    Raises:
        StartupError: a file is missing or cannot be read, or the template has a syntax error.
    """
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise StartupError(f"no tokenizer.json in {folder}", param="model")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise StartupError(f"cannot read {path}: {error}", param="model") from error
    config = _read_config(Path(folder) / "tokenizer_config.json")
    source = _template_source(Path(folder), config)
    if source is None:
        return FolderTokenizer(tokenizer, None)
    try:
        return FolderTokenizer(tokenizer, ChatTemplate(source, _special_tokens(config)))
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(f"chat template of {folder}, line {error.lineno}: {error.message}", param="model") from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise StartupError(f"cannot read {path}: {error}", param="model") from error
    if not isinstance(config, dict):
        raise StartupError(f"cannot read {path}: not a JSON object", param="model")
    return config


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        return next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return source


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token``, ``eos_token`` and so on, as templates expect them."""
    tokens: dict[str, str] = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[name] = text
    return tokens


class ChatTemplate:
    """A model's chat template, with the environment that the ecosystem's templates are written for."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Message]) -> str:
        """Raises `InvalidRequest` with the template's own message."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:  # foreign code: whatever it trips over, the messages made it
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training: no effect here."""

    tags = {"generation"}  # noqa: RUF012 (how jinja2 declares a tag)

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    # Not jinja2's own, which escapes for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


def check_text(text: object, param: str) -> str:
    """``text`` itself if it is text that can be encoded.

    Raises:
        InvalidRequest: no string, or one with half of a surrogate pair.
    """
    if not isinstance(text, str):
        raise InvalidRequest(f"{param} must be a string, not {_kind(text)}", param=param)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{param} holds a lone surrogate, U+{ord(text[error.start]):04X}, at character {error.start}", param=param
        ) from None
    return text


def read_messages(messages: object) -> list[Message]:
    """Chat messages in the field's usual form, with ``content`` as one string.

    ``content`` is a string or a list of ``{"type": "text", "text": …}`` parts, which are joined as they are.

    Raises:
        InvalidRequest: ``param`` names the place, as in ``messages[1].content[0].text``.
        UnsupportedFeature: a part that is no text, or a key that this engine knows no meaning for.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InvalidRequest("messages must be a list of at least one message", param="messages")
    return [_read_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _read_message(message: object, place: str) -> Message:
    fields = _read_object(message, place, ("role", "content"))
    role = check_text(fields.get("role"), f"{place}.role")
    if not role:
        raise InvalidRequest(f"{place}.role must not be empty", param=f"{place}.role")
    content = fields.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_read_part(part, f"{place}.content[{j}]") for j, part in enumerate(content))
    return {"role": role, "content": check_text(content, f"{place}.content")}


def _read_part(part: object, place: str) -> str:
    if isinstance(part, dict) and part.get("type") != "text":
        kind = check_text(part.get("type"), f"{place}.type")
        raise UnsupportedFeature(f"{place}.type {kind!r} is not supported, only 'text'", param=f"{place}.type")
    return check_text(_read_object(part, place, ("type", "text")).get("text"), f"{place}.text")


def _read_object(value: object, place: str, known: tuple[str, ...]) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be an object, not {_kind(value)}", param=place)
    for key, given in value.items():
        # Clients send back what they got: keys that say nothing are no wish.
        if key not in known and given not in (None, [], {}):
            raise UnsupportedFeature(f"{place}.{key} is not supported", param=f"{place}.{key}")
    return value


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
