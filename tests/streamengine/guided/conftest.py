import pytest

from streamengine.guided.matcher import Vocabulary
from tests.fakes import EOS, VOCAB_SIZE, byte_tokenizer_json


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary.of_model(byte_tokenizer_json(), VOCAB_SIZE, (EOS,))
