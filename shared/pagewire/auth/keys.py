"""API keys: how they are made, stored as digests and looked up.

A generated key has 256 random bits. It cannot be guessed from its plain SHA-256. A salt or a slow
hash would only make every request slower.
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pagewire.auth.rate_limits import RateLimits
from pagewire.config.yaml_files import RepeatedKeyError, parse_yaml

KEYS_VARIABLE = "PAGEWIRE_API_KEYS"
_PREFIX = "pw-"
# Shorter keys could be guessed from their digests.
MIN_KEY_LENGTH = 20
_LIMITS = tuple(field.name for field in fields(RateLimits))
_FIELDS = ("name", "sha256", "tenant", "operator", *_LIMITS)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An entry of a key file: the digest of a key, its owner and its limits."""

    name: str
    digest: bytes  # SHA-256
    tenant: str
    limits: RateLimits
    # Whether it may see the cost of other clients' requests, but never their text.
    operator: bool = False


class KeyRing:
    """The keys that a server accepts."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """ValueError for two keys with the same name or digest."""
        # The time of a dict lookup depends on its keys. Digests are hashed with a secret of this
        # process, so a caller learns nothing about them from response times.
        self._secret = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            hashed = self._hash_digest(key.digest)
            if key.name in names or hashed in self._keys:
                raise ValueError(f"the key {key.name!r} is given twice; remove one")
            names.add(key.name)
            self._keys[hashed] = key

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> set[str]:
        """The names of all keys."""
        return {key.name for key in self._keys.values()}

    def find(self, presented: bytes) -> ApiKey | None:
        """The entry of a presented key, None if the key is unknown."""
        return self._keys.get(self._hash_digest(hashlib.sha256(presented).digest()))

    def _hash_digest(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def bearer(authorization: str | bytes) -> bytes | None:
    """The key in an `authorization` header or metadata; None if its scheme is not Bearer."""
    given = authorization.encode() if isinstance(authorization, str) else authorization
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None


def new_key() -> str:
    """A new random key."""
    return _PREFIX + secrets.token_urlsafe(32)


def entry_of(
    name: str, key: str, tenant: str | None, limits: RateLimits, operator: bool = False
) -> str:
    """The line of a key file for a key: an item of a YAML list, written as JSON."""
    given = {name: getattr(limits, name) for name in _LIMITS}
    entry: dict[str, Any] = {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
    if tenant is not None:
        entry["tenant"] = tenant
    if operator:
        entry["operator"] = True
    return "- " + json.dumps(entry | {name: n for name, n in given.items() if n is not None})


def read_keys(file: str | None, environment: str) -> KeyRing | None:
    """The keys of a file and of the value of an environment variable; None if neither is given.

    The file is a YAML or JSON list of entries as `entry_of` writes them. The variable holds keys
    without limits, separated by commas, each as KEY or NAME=KEY. ValueError says what is wrong,
    without quoting a key.
    """
    if not file and not environment.strip():
        return None
    of_file = keys_in(_content(file), file) if file else []
    keys = [*of_file, *_of_environment(environment)]
    if not keys:
        raise ValueError(f"{file} has no keys; make one with `pagewire keys new NAME`")
    return KeyRing(keys)


def _content(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise ValueError(f"--api-keys-file {file} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ValueError(f"--api-keys-file {file} is not a text in UTF-8") from None


def keys_in(text: str, path: str) -> list[ApiKey]:
    """The keys in the text of a file; ValueError names `path` and what is wrong."""
    import yaml  # here, so that `pagewire --help` starts faster

    try:
        entries = parse_yaml(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise ValueError(f"{path}{line}: neither YAML nor JSON") from None
    except RecursionError:
        raise ValueError(f"{path}: its lists are nested too deeply") from None
    except RepeatedKeyError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(entries, list):
        raise ValueError(f"{path}: must hold a list of keys; `pagewire keys new NAME` prints one")
    keys = []
    for number, entry in enumerate(entries, 1):
        try:
            keys.append(_parse(entry))
        except ValueError as error:
            raise ValueError(f"{path}: key {number}: {error}") from None
    return keys


def _parse(entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise ValueError("an entry must be a mapping with name and sha256")
    for field in entry:
        if field not in _FIELDS:
            raise ValueError(f"unknown field {field!r}; known are {', '.join(_FIELDS)}")
    name, digest = _text(entry, "name"), _text(entry, "sha256")
    try:
        decoded = bytes.fromhex(digest)
    except ValueError:
        decoded = b""
    if len(decoded) != 32:
        raise ValueError(f"the sha256 of {name!r} is not 64 hexadecimal digits")
    limits = RateLimits(**{field: _count(entry, field) for field in _LIMITS})
    tenant = _text(entry, "tenant") if "tenant" in entry else name
    operator = entry.get("operator", False)
    if not isinstance(operator, bool):
        raise ValueError(f"operator is {operator!r}; it must be true or false")
    return ApiKey(name, decoded, tenant, limits, operator)


def _text(entry: dict[str, Any], field: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise ValueError(f"{field} must be a text, printable and not empty")
    return value


def _count(entry: dict[str, Any], field: str) -> int | None:
    value = entry.get(field)
    if value is None:
        return None
    if type(value) is not int or value < 1:
        raise ValueError(f"{field} is {value!r}; it must be a whole number of at least 1")
    return value


def _of_environment(text: str) -> list[ApiKey]:
    keys = []
    for number, part in enumerate((part.strip() for part in text.split(",")), 1):
        if not part:
            continue
        # A key may end with base64 padding.
        named, equals, _ = part.rstrip("=").partition("=")
        name, key = (named, part[len(named) + 1 :]) if equals else (f"environment-{number}", part)
        if not name or not name.isprintable():
            raise ValueError(
                f"the key {number} of {KEYS_VARIABLE} has no printable name before its `=`"
            )
        if len(key) < MIN_KEY_LENGTH:
            raise ValueError(
                f"the key {number} of {KEYS_VARIABLE} has fewer than {MIN_KEY_LENGTH} characters; "
                "make one with `pagewire keys new NAME`"
            )
        keys.append(ApiKey(name, hashlib.sha256(key.encode()).digest(), name, RateLimits()))
    return keys
