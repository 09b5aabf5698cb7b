"""What every test of the SDK gets: no message leaves either side that does not fit the schema."""

from collections.abc import Iterator
from typing import get_args

import pytest

from streamengine_sdk import wire
from tests.schema import validate


@pytest.fixture(scope="module", autouse=True)
def _every_message_fits_the_schema() -> Iterator[None]:
    encode = wire.encode

    def checked(message: wire.ClientMessage | wire.ServerMessage) -> str:
        text = encode(message)
        validate("client" if isinstance(message, get_args(wire.ClientMessage)) else "server", text)
        return text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "encode", checked)
        yield
