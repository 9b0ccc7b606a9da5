"""How much faster 500 questions are answered than by the course's loop, on a CPU.

The course asks one question at a time and runs the whole model again for each of 32 characters. Headway answers them as
one batch with a key-value cache and stops at the closing mark. Both use the same weights, float32, all cores; the
answers must be the same. Prints both times and their ratio.

    python benchmarks/decode_speed.py [--questions 500] [--train-steps 60] [--repeat 3]

The model is finetuned for a few steps first, so that answers end where answers end; --train-steps 0 measures the worst
case, a model that never stops before the limit.
"""

from __future__ import annotations

import argparse
import time

import torch

from headway.configuration import load_settings
from headway.console import Lines
from headway.making import build_tokenizer
from headway.models import CausalModel
from headway.tasks import QuestionAnswering
from headway.tasks.base import next_token_loss
from headway.training.device import describe_machine
from headway.training.order import Shuffled, generator


def course_loop(model: CausalModel, task: QuestionAnswering, questions: list[str]) -> list[str]:
    """One question at a time, a full forward pass a character, always 32 characters."""
    answers = []
    with torch.inference_mode():
        for question in questions:
            tokens = torch.tensor([task.prompt(question)])
            begin = tokens.shape[1]
            for _ in range(32):
                logits = model(tokens[:, -task.block :])[:, -1]
                logits[:, task.tokenizer.pad] = float("-inf")
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], 1)
            written = task.tokenizer.decode(tokens[0, begin:].tolist(), specials=True)
            answers.append(written.split("⁇")[0])
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--train-steps", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3, help="times Headway's side is measured; the median counts")
    options = parser.parse_args()

    settings = load_settings("birthplaces/course-vanilla")
    tokenizer = build_tokenizer(settings, Lines())
    task = settings.task.build(tokenizer, settings.model.block)
    task.load()
    torch.manual_seed(0)
    model = settings.model.build(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    order = Shuffled(task.examples, 32, 0)
    for step in range(options.train_steps):
        batch = task.batch(order.rows(step), generator(0)).trimmed()
        (next_token_loss(model, batch) / batch.learned()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    questions = [pair.source for pair in task.pairs("dev")][: options.questions]

    task.answer(model, questions[:8])
    times = []
    for _ in range(options.repeat):
        began = time.perf_counter()
        ours = [answer.text for answer in task.answer(model, questions)]
        times.append(time.perf_counter() - began)
    fast = sorted(times)[len(times) // 2]
    began = time.perf_counter()
    theirs = course_loop(model, task, questions)
    slow = time.perf_counter() - began

    equal = sum(mine == other for mine, other in zip(ours, theirs, strict=True))
    print(f"{describe_machine()}, {len(questions)} questions")
    print(f"the course's loop   {slow:8.2f} s")
    print(f"Headway             {fast:8.2f} s   (median of {options.repeat})")
    print(f"ratio               {slow / fast:8.1f} ×")
    print(f"same answers        {equal} of {len(questions)}")


if __name__ == "__main__":
    main()
