"""Secrets are masked in all output of a configuration, and other values are not."""

from __future__ import annotations

import doctest
import os
from pathlib import Path

import pytest

from fabricx import redaction
from fabricx.redaction import (
    MASK,
    is_secret,
    masked,
    masked_command,
    masked_keys,
    masked_text,
    masked_values,
    printable,
)

SECRET = [
    "password",
    "passwd",
    "PASSWORD",
    "db_password",
    "userPassword",
    "dbpassword",
    "passphrase",
    "secret",
    "client_secret",
    "clientSecret",
    "aws_secret_access_key",
    "token",
    "auth_token",
    "authtoken",
    "hf_token",
    "HF_TOKEN",
    "access-token",
    "accessToken",
    "api_token",
    "api_key",
    "apikey",
    "apiKey",
    "API_KEY",
    "WANDB_API_KEY",
    "x-api-key",
    "access_key",
    "private_key",
    "ssh_key",
    "account_key",
    "credential",
    "credentials",
    "auth",
    "basic_auth",
    "oauth",
    "authorization",
    "Authorization",
    "logger.wandb.api_key",
    "auth.user",
    "db_pass",
    "pwd",
    "refresh_tokens",
    "my_token",
    "secretKey",
    "jwt",
    "session_cookie",
    "passcode",
]
OPEN = [
    "tokenizer",
    "num_tokens",
    "max_tokens",
    "token_embedding",
    "author",
    "authors",
    "authority",
    "pad_token",
    "eos_token",
    "cls_token",
    "use_cls_token",
    "tokens",
    "tokens_per_batch",
    "token_dim",
    "key",
    "keys",
    "sort_key",
    "num_keys",
    "key_dim",
    "query_key_norm",
    "monkey",
    "lr",
    "hidden",
    "passes",
    "forward_pass",
    "bypass",
    "compass",
    "secretary",
    "password_file",
    "token_path",
    "special_tokens",
    "mask_token",
    "accessor",
    "path",
    "monitor",
    "authored_by",
]


@pytest.mark.parametrize(("keys", "expected"), [(SECRET, True), (OPEN, False)], ids=["secret", "open"])
def test_a_secret_is_recognised_by_its_key(keys: list[str], expected: bool) -> None:
    assert [key for key in keys if is_secret(key) is not expected] == []


def test_all_values_below_a_secret_key_are_masked_and_other_values_are_kept() -> None:
    arguments = {
        "auth": {"user": "me", "parts": ["abc", 7]}, "password": 12345, "token": None, "use_auth_token": True,
        "secret": "", "net": {"max_tokens": 5, "sizes": (1, 2)}, "pad_token": "<pad>",
    }  # fmt: skip
    assert masked(arguments) == {
        "auth": {"user": MASK, "parts": [MASK, MASK]}, "password": MASK, "token": None, "use_auth_token": True,
        "secret": "", "net": {"max_tokens": 5, "sizes": (1, 2)}, "pad_token": "<pad>",
    }  # fmt: skip
    assert list(masked_keys(masked(arguments))) == ["auth.user", "auth.parts.0", "auth.parts.1", "password"]


@pytest.mark.parametrize(
    "text",
    [
        "postgres://me:hunter2@host/db", "http://me:hunter2@host:80/a?b=c", "redis://:hunter2@host", r"pg\://me\:hunter2@host",
        "mongodb+srv://a:hunter2@b",
        "https://hunter2@github.com/a/b", "https://host/path?token=hunter2&x=1", "https://host/?a=1&api_key=hunter2",
        "Server=a;Password=hunter2;Timeout=3", "host=a password='hunter2' port=3", "api_key: hunter2",
        '{"api_key": "hunter2"}', "{'token': 'hunter2', 'a': 1}", "Net(api_key='hunter2', lr=1)",
        "Authorization: Bearer hunter2", "Bearer hunter2hunter2",
        "logger.api_key=hunter2", "could not parse +logger.wandb.password=hunter2", "http://a:p@hunter2@host/",
    ],
)  # fmt: skip
def test_no_output_contains_a_secret(text: str) -> None:
    assert "hunter2" not in masked_text(text)
    assert MASK in masked_text(text)


def test_text_without_secrets_is_unchanged() -> None:
    for text in ("lr=0.1, max_tokens=5", "see https://host/a:b", "git@github.com:a/b", "ssh://git@host/a", "a: b",
                 "3 tokens: 5", "token=null", "tokenizer: bert", "s3://bucket/key=1/a", "author: me"):  # fmt: skip
        assert masked_text(text) == text


def test_a_masked_value_is_masked_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_secrets", set())
    masked({"logger": {"api_key": "a-long-value", "password": "abc"}, "url": "pg://me:another-one@host"})
    assert masked_text("refused: a-long-value, another-one, abc") == f"refused: {MASK}, {MASK}, abc"


def test_secrets_in_lists_and_in_text_that_is_json_are_masked() -> None:
    arguments = {"args": ["run", "--token", "hunter2", "--password=hunter2", "--token", "--fast"],
             "payload": '{"password": "hunter2", "a": 1}', "nets": [{"heads": {"api_key": "hunter2"}}]}  # fmt: skip
    assert masked(arguments) == {
        "args": ["run", "--token", MASK, f"--password={MASK}", "--token", "--fast"],
        "payload": f'{{"password": "{MASK}", "a": 1}}', "nets": [{"heads": {"api_key": MASK}}],
    }  # fmt: skip


def test_parameters_of_urls_in_logs_and_tracebacks_are_masked_and_code_stays() -> None:
    assert masked_values("401 for https://host/a?x=1&access_token=hunter2#b") == (
        f"401 for https://host/a?x=1&access_token={MASK}#b"
    )
    for text in ("token = tokens[i]", "https://host/a?max_tokens=3&b=2", "a&token=null", "f(token=token)"):
        assert masked_values(text) == text


def test_a_command_line_keeps_its_form() -> None:
    arguments = ["python", "-m", "fabricx", "fit", "~x", "++a.token=a, b", "--api-key=abc", "--password", "abc",
             "--verbose", "+logger.w={api_key:abc,project:x}", "url=http://a:abc@b", "module.lr=0.1,0.2",
             "--token", "--fast"]  # fmt: skip
    output = masked_command(arguments)
    assert "abc" not in output
    assert "a, b" not in output
    for kept in ("python -m fabricx fit '~x'", "++a.token=", "project:x", "module.lr=0.1,0.2", "--verbose", "--fast"):
        assert kept in output


def test_a_command_with_bytes_that_are_no_text_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "command.txt").write_text(masked_command(["fit", os.fsdecode(b"data=/\xff")]))
    assert (tmp_path / "command.txt").read_text() == "fit 'data=/\\udcff'"


def test_printed_text_sends_no_control_characters_to_the_terminal() -> None:
    assert printable("a\x1b[2J\x07\x9b\r\u202eb\n\té") == "a�[2J����b\n\té"


def test_examples_of_secrets_are_masked() -> None:
    assert doctest.testmod(redaction).failed == 0
