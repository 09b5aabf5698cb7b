"""Greedy answers of transformers itself, the truth that every path of ours must equal token by token.

``python tests/golden/record.py`` writes them anew; a slow test compares what is written with a fresh run.
"""

import json
from collections.abc import Iterator
from pathlib import Path

FILE = Path(__file__).parent / "smollm2_greedy.json"
ANSWER_TOKENS = 64

STORY = (
    "The lighthouse keeper climbed the spiral stairs every evening at dusk, counting the steps as he went. "
    "He knew each of them by its sound. On the night of the great storm he counted one step too many. "
)

PROMPTS = [
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "1, 2, 3, 5, 8, 13,",
    "Q: What is the boiling point of water?\nA:",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nAnswer in one word.<|im_end|>\n<|im_start|>user\nIs the sky blue?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "SELECT name, age FROM users WHERE",
    '{"name": "Ada", "languages": ["',
    "Der Himmel ist blau, weil",
    "La vie est",
    "東京は",
    "🙂🙃🙂🙃",
    "x",
    "    \n\n",
    "The quick brown fox jumps over the lazy dog. " * 4,
    STORY * 6,
    "import numpy as np\n\n\ndef softmax(x: np.ndarray) -> np.ndarray:\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
]


def answers(folder: str, prompts: list[list[int]]) -> Iterator[list[int]]:
    """transformers' greedy continuation of each prompt in float32, eager, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    for prompt in prompts:
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=ANSWER_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        yield output[0, len(prompt) :].tolist()


def main() -> None:
    from transformers import AutoTokenizer

    from compiled.weights import resolve

    folder = str(resolve("smollm2-135m", offline=True, report=lambda *_: None))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer(text).input_ids for text in PROMPTS]
    cases = [
        {"text": text, "prompt": prompt, "answer": answer}
        for text, prompt, answer in zip(PROMPTS, prompts, answers(folder, prompts), strict=True)
    ]
    FILE.write_text(json.dumps(cases, ensure_ascii=False).replace('{"text"', '\n{"text"') + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
