"""`Credentials`, with which requests are signed for brokers that control access."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

_ACCESS_KEY, _SECURITY_TOKEN, _SIGNATURE = "AccessKey", "SecurityToken", "Signature"


@dataclass(frozen=True)
class Credentials:
    """The name and keys of a broker's user. The secret key signs requests. It is never sent, logged or in errors."""

    access_key: str
    secret_key: str = field(repr=False)
    security_token: str | None = field(default=None, repr=False)

    def sign(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """Return the fields of a request together with the user's name, token and signature."""
        named = {**fields, _ACCESS_KEY: self.access_key}
        if self.security_token is not None:
            named[_SECURITY_TOKEN] = self.security_token
        # The signed content is the values in the order of their names. Java orders names by UTF-16, which makes no
        # difference for the names in use.
        content = "".join(named[name] for name in sorted(named)).encode() + body
        digest = hmac.new(self.secret_key.encode(), content, hashlib.sha1).digest()
        return {**named, _SIGNATURE: base64.b64encode(digest).decode()}
