"""Text and chat messages to token ids and back. The only importer of the tokenizer and template libraries.

Owns the chat template and which special tokens are added. Pure but for reading a model folder once.
Templates come with a model, so they are foreign code: they run in jinja2's immutable sandbox, and what
goes wrong inside is the request's fault, never the engine's.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamengine.calls.conversation import for_template, has_calls, in_words, read_calls
from streamengine.calls.format import CallFormat, Message, Tool, learn
from streamengine.checks import check_text
from streamengine.errors import InvalidRequest, StartupError, UnsupportedFeature

REPLACEMENT = "\ufffd"

MAX_ROLE = 64
"""Characters. Roles are the template's to know, but none is longer than a word."""

ROLE_FIELDS = {
    "system": ("name",),
    "user": ("name",),
    "assistant": ("name", "tool_calls"),
    "tool": ("name", "tool_call_id"),
}
"""Of messages, beside ``role`` and ``content``."""

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

MAX_TURNS = 100_000
"""How often the loops and macros of a template may run in one rendering; conversations need a few per message."""

MAX_REPEATED = 10_000
TURN = "_turn"


class Tokenizer(Protocol):
    """What the engine needs of a vocabulary. Called from several threads at once."""

    vocab_size: int
    longest_token: int
    """Characters of text that one token covers at most: longer text needs more tokens."""

    def encode(self, text: str) -> list[int]:
        """A prompt's ids, with the special tokens that this vocabulary puts around a text."""
        ...

    def encode_part(self, text: str) -> list[int]:
        """The ids of a piece of text that stands in another, without special tokens."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Ids outside the vocabulary have no text, nor special tokens unless ``special``; broken characters are
        U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token writes, in UTF-8: perhaps a part of a character. Nothing for special tokens."""
        ...

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        """The template's ids for ``messages`` (of `read_messages`), up to where the assistant speaks. ``options`` are
        what else a template may look at.

        Raises:
            InvalidRequest: the template refuses them, with its own message; an option that is not the client's to set.
        """
        ...

    def calls(self) -> CallFormat:
        """How the template writes calls of tools. Raises UnsupportedFeature where that is not understood."""
        ...


def _byte_level_alphabet() -> dict[str, int]:
    """Character → byte of byte-level vocabularies: visible bytes stand for themselves, the others from U+0100 on."""
    visible = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_LEVEL = _byte_level_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class FolderTokenizer:
    """A `Tokenizer` over ``tokenizer.json`` and a chat template."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: "ChatTemplate | None") -> None:
        # A saved tokenizer may carry the truncation and padding of somebody's training run.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self._tokenizer = tokenizer
        self._template = template
        self._bytes: dict[int, bytes] = {}
        self._calls: CallFormat | UnsupportedFeature | None = None
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token = max(map(len, vocabulary), default=1)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, special=True)

    def encode_part(self, text: str) -> list[int]:
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        """As a batch of one: `encode` itself keeps the interpreter's lock, for seconds where the text is long."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        return encoding.ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def token_bytes(self, token: int) -> bytes:
        if (data := self._bytes.get(token)) is None:
            data = self._bytes[token] = self._spell(token)
        return data

    def _spell(self, token: int) -> bytes:
        text, piece = self.decode((token,)), self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if piece.startswith("▁"):
            # Alone, a word of a sentence-piece vocabulary loses the space before it.
            return b" " * (len(piece) - len(piece.lstrip("▁"))) + text.lstrip(" ").encode()
        if REPLACEMENT not in text:
            return text.encode()
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        if all(character in _BYTE_LEVEL for character in piece):
            return bytes(_BYTE_LEVEL[character] for character in piece)
        return text.encode()

    def chat(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> list[int]:
        template = self._require_template()
        if tools or has_calls(messages):
            calls = self.calls()
            messages = for_template(messages, calls) if calls.native else in_words(messages, tools, calls)
            tools = tools if calls.native else ()
        # The template writes the special tokens itself.
        return self.encode_part(template.render(messages, tools, options))

    def calls(self) -> CallFormat:
        if self._calls is None:
            added = self._tokenizer.get_added_tokens_decoder()
            try:
                self._calls = learn(self._require_template().render, {token.content: id for id, token in added.items()})
            except UnsupportedFeature as error:
                self._calls = error
        if isinstance(self._calls, UnsupportedFeature):
            raise UnsupportedFeature(self._calls.message, param=self._calls.param)
        return self._calls

    def _require_template(self) -> "ChatTemplate":
        if self._template is None:
            raise InvalidRequest("this model has no chat template: send prompt or token_ids", param="messages")
        return self._template


def load_tokenizer(folder: str | Path) -> FolderTokenizer:
    """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` (the latter two optional).

    Raises:
        StartupError: one of them is missing or broken; by its name.
    """
    path = Path(folder) / "tokenizer.json"
    text = _read(path)
    if text is None:
        raise StartupError(f"no tokenizer.json in {folder}", param="model")
    try:
        tokenizer = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing narrower
        raise _broken(path, error) from error
    path = Path(folder) / "tokenizer_config.json"
    config = _read_config(path)
    if (source := _read(alone := Path(folder) / "chat_template.jinja")) is not None:
        path = alone
    else:
        source = _config_template(path, config.get("chat_template"))
    if source is None:
        return FolderTokenizer(tokenizer, None)
    try:
        return FolderTokenizer(tokenizer, ChatTemplate(source, _special_tokens(config)))
    except jinja2.TemplateSyntaxError as error:
        raise _broken(path, f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # foreign code: nested too deep, for one
        raise _broken(path, f"chat template: {type(error).__name__}") from error


def _broken(path: Path, reason: object) -> StartupError:
    return StartupError(f"cannot read {path}: {reason}", param="model")


def _read(path: Path) -> str | None:
    """The text of ``path``, or None where there is nothing of that name."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _broken(path, error) from error


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path) or "{}")
    except (ValueError, RecursionError) as error:
        raise _broken(path, error) from error
    if not isinstance(config, dict):
        raise _broken(path, "not a JSON object")
    return config


def _config_template(path: Path, template: object) -> str | None:
    """A template, or that called ``default`` among several: ``[{"name": …, "template": …}, …]``."""
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if template is None or isinstance(template, str):
        return template
    raise _broken(path, "chat_template is neither a string nor a list of named ones")


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
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), options: Mapping[str, Any] = NO_OPTIONS
    ) -> str:
        """Raises `InvalidRequest` with the template's own message."""
        given = {
            TURN: _turns(MAX_TURNS).__next__,
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": True,
            **({"tools": list(tools)} if tools else {}),  # some ask no more than whether it is there
        }
        if ours := options.keys() & {*given, "tools"}:
            text = f"chat_template_kwargs cannot set {', '.join(sorted(ours))}"
            raise InvalidRequest(text, param="chat_template_kwargs")
        try:
            return self._template.render({**given, **options})
        except Exception as error:  # foreign code: whatever it trips over, the messages made it
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from error


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that also bounds work: each turn of a loop and each call of a macro counts, text repeats little."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        blocks: Iterator[Any] = template.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for block in list(blocks):
            turn = nodes.ExprStmt(nodes.Call(nodes.Name(TURN, "load"), [], [], None, None), lineno=block.lineno)
            block.body.insert(0, turn.set_environment(self).set_lineno(block.lineno))
        return template

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise jinja2.TemplateError("powers are not computed")
        for sequence, times in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                if len(sequence) * times > MAX_REPEATED:
                    raise jinja2.TemplateError(f"more than {MAX_REPEATED} repeated items")
        return super().call_binop(context, operator, left, right)


def _turns(most: int) -> Iterator[str]:
    for _ in range(most):
        yield ""
    raise jinja2.TemplateError(f"it runs its loops more than {most} times")


class _Generation(Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training: no effect here."""

    tags = {"generation"}  # noqa: RUF012 (how jinja2 declares a tag)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, indent: int | None = None, separators: Any = None, sort_keys: bool = False, **more: Any) -> str:
    # Not jinja2's own, which escapes for HTML.
    more = {"ensure_ascii": False, **more}
    return json.dumps(value, indent=indent, separators=separators, sort_keys=sort_keys, **more)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().astimezone().strftime(format)


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
    role = message.get("role") if isinstance(message, dict) else None
    of_role = ROLE_FIELDS.get(role, ()) if isinstance(role, str) else ()
    fields = _read_object(message, place, ("role", "content", *of_role))
    role = check_text(role, f"{place}.role")
    if not 1 <= len(role) <= MAX_ROLE:
        raise InvalidRequest(f"{place}.role must have 1 to {MAX_ROLE} characters", param=f"{place}.role")
    content = fields.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_read_part(part, f"{place}.content[{j}]") for j, part in enumerate(content))
    read: Message = {"role": role}
    if fields.get("tool_calls"):
        read["tool_calls"] = read_calls(fields["tool_calls"], f"{place}.tool_calls")
        content = "" if content is None else content
    for name in ("tool_call_id", "name"):
        if fields.get(name) is not None:
            read[name] = check_text(fields[name], f"{place}.{name}")
    return {**read, "content": check_text(content, f"{place}.content")}


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
