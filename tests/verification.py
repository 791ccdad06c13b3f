"""What verification costs beside the pass that it verifies: python tests/verification.py

A target of random weights in the shape of Qwen2.5 1.5B scores gamma + 1 positions of each sequence in one pass; then each rule
verifies as many drafts over a vocabulary of 152,064, drawn from a distribution near the target's. One thread, fp32 unless asked.
"""

import argparse
import json
import time
from statistics import median

import torch
from transformers import DynamicCache

import specplug
from specplug.cache import NAME
from specplug.models import load_model
from specplug.verify import sample_by_inversion, verify_block, verify_token


def timed(call, repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--gamma", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=152_064)
    parser.add_argument("--target", default="shape_qwen1b5", help="a choice of the group target")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    model = load_model(specplug.load("recipe=bench", f"target={given.target}", "draft=lookup").target, "target")
    ids = torch.randint(3, 900, (given.batch_size, 64 + given.gamma + 1), device=model.device)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids[:, :64], use_cache=True, **{NAME: cache})

        def target_pass() -> None:
            model(input_ids=ids[:, 64:], use_cache=True, **{NAME: cache})
            cache.crop(-(given.gamma + 1))

        pass_seconds = timed(target_pass, 3)
    shape = (given.batch_size, given.gamma + 1, given.vocabulary)
    logits = torch.randn(shape, device=model.device) * 3
    target = logits.softmax(-1)
    draft = (logits[:, :-1] + 0.3 * torch.randn_like(logits[:, :-1])).softmax(-1)
    tokens = torch.stack([sample_by_inversion(each) for each in draft.unbind(1)], dim=1)
    result = {
        "batch_size": given.batch_size,
        "gamma": given.gamma,
        "vocabulary": given.vocabulary,
        "pass": pass_seconds,
    }
    for name, rule in (("token", verify_token), ("block", verify_block)):
        result[name] = timed(lambda rule=rule: rule(tokens, draft, target), 5)
        result[f"{name}_share"] = result[name] / pass_seconds
    print(json.dumps(result))


if __name__ == "__main__":
    main()
