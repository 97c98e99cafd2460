"""Mask secrets in all output: configurations, command lines, messages.

A secret is recognised by its key (`password`, `api_key`, `hf_token`, ...) or as the password of a URL. The run uses
the real values; only output is masked.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

MASK: Final = "<masked>"
_SHORT: Final = 6  # characters; shorter secrets are not searched in texts, because they may be parts of words

_WORDS: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_ALWAYS: Final = re.compile(
    r"passw|passphrase|pwd$|secrets?$|credential|(api|access|private|secret|encryption|signing|account)keys?$"
    r"|passcode|jwt$|bearer$|cookies?$|(o|basic|http)?auth$|authoriz|authentic|(auth|access|api|bearer|refresh|session|user|bot|hf|hub)tokens?$"
)
_LOCATIONS: Final = {"file", "path", "dir", "folder", "env", "type", "method", "mode"}  # such as password_file
_KEY_OF: Final = {
    "access", "account", "anthropic", "api", "app", "application", "auth", "aws", "azure", "client", "comet",
    "encryption", "gcp", "google", "hf", "hmac", "license", "master", "neptune", "openai", "private", "rsa", "sas",
    "secret", "security", "service", "shared", "signing", "ssh", "storage", "subscription", "wandb",
}  # fmt: skip
_PASS_OF: Final = {"admin", "db", "ftp", "login", "mail", "mysql", "postgres", "redis", "root", "smtp", "ssh", "user"}
_TOKEN_OF_TEXT: Final = {
    "audio", "begin", "bos", "by", "class", "cls", "decoder", "dist", "distillation", "document", "encoder", "end",
    "eos", "eot", "extra", "first", "image", "input", "last", "loss", "mask", "masked", "new", "newline", "next",
    "null", "oov", "output", "pad", "padding", "patch", "per", "pooling", "prefix", "previous", "prompt", "query",
    "register", "sep", "separator", "sequence", "special", "start", "stop", "sub", "suffix", "target", "text",
    "time", "tool", "unk", "unknown", "video", "vision", "visual", "vocab", "word",
}  # fmt: skip
_TOKENS_OF: Final = {"access", "api", "auth", "bearer", "refresh", "session"}

_URL: Final = re.compile(  # Hydra escapes colons with a backslash
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*\\?://)(?P<user>[^\s/?#@:'\"\\]*)(?P<colon>\\?:)?(?P<pw>[^\s/?#'\"]*)@(?=[^\s])"
)
_VALUE: Final = re.compile(
    r"""(?:Bearer|Basic|Token)\s+[^\s"',;]+|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s"',;&}\])]+"""
)
_PARAMETER: Final = re.compile(r"(?P<key>[?&][A-Za-z_][\w.-]*=)(?P<value>[^\s&#'\"<>]+)")
_ASSIGNED: Final = re.compile(r"([A-Za-z_][\w.-]*)=")
_STATED: Final = re.compile(r"""([A-Za-z_][\w.-]*)["']?\s*[=:]\s*(?!//)""")
_BEARER: Final = re.compile(r"\b(?P<kind>Bearer|Basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_NO_SECRET: Final = ("", "...", "null", "none", "true", "false", MASK)
_secrets: set[str] = set()  # secret values from this process's configuration and URLs


def is_secret(key: str) -> bool:
    """Return whether a key, or any part of a dotted key, names a secret.

    Args:
        key: key such as "api_key", "hfToken" or "db.password".

    >>> [key for key in ("api_key", "hfToken", "db.password", "max_tokens", "tokenizer", "author") if is_secret(key)]
    ['api_key', 'hfToken', 'db.password']
    """
    return any(_names_secret([word.lower() for word in _WORDS.findall(part)]) for part in re.split(r"[./]", key))


def _names_secret(words: Sequence[str]) -> bool:
    if not words or words[-1] in _LOCATIONS:
        return False
    if any(_ALWAYS.search(word) for word in words):
        return True
    for before, word in zip(["", *words], words, strict=False):
        if word in ("key", "keys") and before in _KEY_OF:
            return True
        if word == "pass" and (before in _PASS_OF or len(words) == 1):
            return True
    *before_last, last = words
    if last == "token":
        return not before_last or before_last[-1] not in _TOKEN_OF_TEXT
    return last == "tokens" and bool(before_last) and before_last[-1] in _TOKENS_OF


def masked(value: Any) -> Any:
    """Mask secrets in plain data, and register them, so that `masked_text` and `masked_values` mask them anywhere.

    Args:
        value: nested mappings, lists, text and numbers.

    Returns:
        a masked copy.

    >>> masked({"logger": {"api_key": "abc", "retries": 3}, "db": "pg://me:abc@host/runs"})
    {'logger': {'api_key': '<masked>', 'retries': 3}, 'db': 'pg://me:<masked>@host/runs'}
    """
    if isinstance(value, Mapping):
        return {
            key: _hidden(item) if isinstance(key, str) and is_secret(key) else masked(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return type(value)(_masked_items(value)) if type(value) in (list, tuple) else value
    return _masked_text(value, _STATED if "{" in value else _ASSIGNED) if isinstance(value, str) else value


def _masked_items(items: Sequence[Any]) -> Iterator[Any]:
    """Yield the masked items of a list. The list may be a command line: the item after `--token` is a secret."""
    for before, item in zip([None, *items], items, strict=False):
        hides = isinstance(before, str) and before.startswith("--") and "=" not in before and is_secret(before)
        yield _hidden(item) if hides and not (isinstance(item, str) and item.startswith("-")) else masked(item)


def _hidden(value: Any) -> Any:
    """Mask all values below a secret key, except None, booleans and empty text."""
    if isinstance(value, Mapping):
        return {key: _hidden(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hidden(item) for item in value]
    if value is None or isinstance(value, bool) or value in ("", MASK):
        return value
    if isinstance(value, str) and len(value) >= _SHORT:
        _secrets.add(value)
    return MASK


def masked_keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all masked values, which a resumed run needs again.

    Args:
        value: masked plain data.
        prefix: dotted key of `value`.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from masked_keys(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from masked_keys(item, f"{prefix}.{number}")
    elif isinstance(value, str) and MASK in value:
        yield prefix


def masked_text(text: str) -> str:
    """Mask secrets in a text such as a message or a YAML file, including values after secret keys.

    Args:
        text: the text.

    >>> masked_text("can't open http://me:abc@host/?token=abc, api_key: abc")
    "can't open http://me:<masked>@host/?token=<masked>, api_key: <masked>"
    """
    return _masked_text(text, _STATED)


def _masked_text(text: str, pairs: re.Pattern[str]) -> str:
    return masked_values(_pairs_masked(_URL.sub(_url, text), pairs))


def masked_values(text: str) -> str:
    """Mask passwords and tokens in URLs and registered secrets in foreign text, such as a log line or a traceback.

    Pairs of key and value are not masked: `token = tokens[i]` in a traceback is not a secret. The result can be written
    to a file: see `encodable`.

    Args:
        text: the text.
    """
    text = _PARAMETER.sub(_parameter, _URL.sub(_url, encodable(text)))
    text = _BEARER.sub(rf"\g<kind> {MASK}", text)
    for secret in sorted(_secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def _url(match: re.Match[str]) -> str:
    scheme, user, password = match["scheme"], match["user"], match["pw"]
    if password:
        if len(password) >= _SHORT and password != MASK:
            _secrets.add(password)
        return f"{scheme}{user}{match['colon'] or ''}{MASK}@"
    if user and scheme.startswith(("http:", "https:")):  # a user name without password in an HTTP URL is a token
        return f"{scheme}{MASK}@"
    return match[0]


def _parameter(match: re.Match[str]) -> str:
    hides = is_secret(match["key"][1:-1]) and match["value"].lower() not in _NO_SECRET
    return f"{match['key']}{MASK}" if hides else match[0]


def _pairs_masked(text: str, pairs: re.Pattern[str]) -> str:
    parts, end = [], 0
    for match in pairs.finditer(text):  # matches only keys, because a value may contain pairs
        # Before a colon, only the last part counts: otherwise a host would be a key, and its port a value.
        key = match[1] if "=" in match[0] else match[1].rpartition(".")[2]
        value = _VALUE.match(text, match.end())
        if match.start() < end or value is None or not is_secret(key) or value[0].strip("\"'").lower() in _NO_SECRET:
            continue
        quote = value[0][0] if value[0][0] in "\"'" else ""
        parts += [text[end : match.end()], f"{quote}{MASK}{quote}"]
        end = value.end()
    return "".join([*parts, text[end:]])


def masked_command(arguments: Sequence[str]) -> str:
    """Return a command line with shell quoting and masked secrets.

    Args:
        arguments: the program and its arguments.

    >>> masked_command(["fabricx", "fit", "+logger.api_key=a b,c", "--token", "abc", "lr=0.1"])
    "fabricx fit '+logger.api_key=<masked>' --token '<masked>' lr=0.1"
    """
    shown: list[str] = []
    hide_next = False
    for argument in arguments:
        key, equals, value = argument.lstrip("+~-").partition("=")
        plain_key = re.fullmatch(r"[\w./@-]+", key) is not None
        if hide_next and not argument.startswith("-"):
            shown.append(MASK)
        elif equals and plain_key and is_secret(key) and value:
            shown.append(f"{argument[: len(argument) - len(value)]}{MASK}")
        else:
            shown.append(_masked_text(argument, _STATED if "{" in argument else _ASSIGNED))
        hide_next = argument.startswith("--") and not equals and is_secret(key)
    return encodable(shlex.join(shown))


def encodable(text: str) -> str:
    r"""Escape what a file can't contain: bytes of a file name that are no text, which Python has as surrogates.

    Args:
        text: the text.

    >>> encodable("images/\udcff.png")
    'images/\\udcff.png'
    """
    return text.encode(errors="backslashreplace").decode()


def printable(text: str) -> str:
    r"""Replace control characters, which could control a terminal, except line ends and tabs.

    Args:
        text: the text.

    >>> printable("a\x1b[2Jb\n")
    'a�[2Jb\n'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


@contextlib.contextmanager
def records_masked() -> Iterator[None]:
    """Mask the messages of log records in the context; Hydra's messages contain the overrides of a sweep's jobs."""
    make = logging.getLogRecordFactory()

    def masking(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(*args, **kwargs)
        text = record.getMessage()
        shown = masked_text(text) if record.name.partition(".")[0] in ("hydra", "HYDRA") else masked_values(text)
        if shown != text:
            record.msg, record.args = shown, ()
        return record

    logging.setLogRecordFactory(masking)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)
