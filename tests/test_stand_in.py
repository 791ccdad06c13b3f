"""Decoding on a stand-in for a CUDA device: ids, one wait for the device a round, and graphs in which there is nothing of the host."""

import contextlib
import itertools
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import letters, make_model, noisy_copy, prompt
from stand_in import CUDA, Device, Event, OnDevice

import specplug
from specplug import fixed, launches
from specplug.cache import NAME
from specplug.device import Read
from specplug.drafters.cross_vocab import CrossVocabDrafter
from specplug.drafters.fixed_model import FixedDraft
from specplug.plugin import models_of
from specplug.schedule import ConfidenceSchedule


@pytest.fixture(autouse=True)
def device(monkeypatch, caplog):
    """Nothing may be given up for something else: a draft that fails, a program that is not captured."""
    monkeypatch.setattr(fixed, "USES_BEFORE", 1)
    with torch.no_grad(), Device() as device:
        yield device
    assert not [each.getMessage() for each in caplog.records if each.name.startswith("specplug")]


def padded(lengths):
    width = max(lengths)
    rows = [torch.nn.functional.pad(prompt(length, seed=length), (width - length, 0)) for length in lengths]
    mask = [[0] * (width - length) + [1] * length for length in lengths]
    return dict(input_ids=torch.cat(rows), attention_mask=torch.tensor(mask))


def there(given):
    return {name: each.to(CUDA) for name, each in given.items()}


def models(kind="llama"):
    target = make_model(kind).requires_grad_(False)
    target.generation_config.eos_token_id = None  # so that all rows of a batch have the same number of rounds
    return target, noisy_copy(target, 0.02).requires_grad_(False)


WAITING = {
    "item": lambda x: x[0].item(),
    "if": lambda x: bool(x.sum() > 3),
    "cpu": lambda x: x.cpu(),
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: x.nonzero(),
    "list": lambda x: x[[0, 2]],
    "tensor": lambda x: torch.tensor([1, 2, 3], device=x.device),
    "to": lambda x: torch.tensor([1, 2, 3]).to(x.device, non_blocking=True),  # which is not pinned
    "multinomial": lambda x: torch.ones(3, device=x.device).multinomial(1),
}
STAYING = {
    "arithmetic": lambda x: (x + 1).argmax(-1),
    "index": lambda x: x[x % 2],
    "zeros": lambda x: torch.zeros(3, device=x.device).fill_(2),
    "pinned": lambda x: fixed.to_device([1, 2, 3], x.device),
    "where": lambda x: torch.where(x > 1, x, 0),
}


@pytest.mark.parametrize("name", [*WAITING, *STAYING])
def test_what_the_stand_in_counts(device, name):
    x = torch.arange(1, 4, device=CUDA)
    device.waits.clear()
    (WAITING | STAYING)[name](x)
    assert len(device.waits) == (name in WAITING)


def test_what_the_stand_in_refuses(device):
    x = torch.arange(3, device=CUDA)
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.arange(3)
    assert (x + torch.tensor(1)).tolist() == [1, 2, 3]  # a single number may come from the host
    for call in [*WAITING.values(), STAYING["pinned"]]:
        with pytest.raises(RuntimeError, match="not permitted"), device.capture():
            call(x)


SAMPLED = dict(do_sample=True, temperature=0.8, top_k=20, top_p=0.95)
CALLS = {
    "greedy": dict(do_sample=False),
    "penalty": dict(do_sample=False, repetition_penalty=1.3),
    "sampled": SAMPLED,
}


def waits_a_round(device, plugin, call):
    """Of a third call, without those before its first round; and what it returned."""
    call(), call()
    at: list[int] = []
    plugin.schedule.observe = lambda *_: at.append(len(device.waits))  # of a fixed schedule, which is its own plan
    found = call()
    return (at[-1] - at[0]) / (len(at) - 1), found


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    ("draft", "name"),
    [
        *itertools.product(["model", "lookup", "none"], ["greedy", "sampled"]),
        ("model", "penalty"),
        ("suffix", "greedy"),
        ("chain", "sampled"),
        ("early", "sampled"),
    ],
)
def test_one_wait_a_round(device, draft, name, rows):
    target, model = models()
    call = CALLS[name] | dict(max_new_tokens=18, pad_token_id=0)
    given = padded([9] if rows == 1 else [5, 9, 7])
    expected = target.generate(**given, **call).tolist()
    device.put(target)
    device.put(model)
    early = specplug.load("draft=early_exit", "draft.num_layers=1").draft
    drafters = {"model": model, "chain": ["lookup", model], "early": early, "none": "lookup"}
    gamma = 0 if draft == "none" else 3
    with specplug.attach(target, drafters.get(draft, draft), gamma=gamma, engine="rounds") as plugin:
        waits, found = waits_a_round(device, plugin, lambda: target.generate(**there(given), **call))
        # In a batch the model of a chain keeps a cache for each row.
        drafts = models_of(plugin.drafter) if gamma and (rows == 1 or draft != "chain") else []
        for each in {target, *drafts}:
            assert any(program.graph for kept in fixed._IDLE[each] for program in kept.programs.values())
    assert isinstance(found, OnDevice) and waits == 1, device.waits[-20:]
    if name != "sampled":
        assert found.tolist() == expected


WAYS = {
    "lookahead": dict(engine="lookahead", gamma=3),
    "confidence": dict(schedule=ConfidenceSchedule(4, 0.3)),
    "entropy": dict(schedule=ConfidenceSchedule(4, 0.3, "entropy")),
    "adaptive": dict(),
    "tree": dict(tree=[2, 1]),
    "walk": dict(gamma=3, verify="walk"),
    "uncaptured": dict(gamma=3, graph="off"),
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_draft_runs_there(device, way, rows):
    target, model = models()
    call = dict(max_new_tokens=10, pad_token_id=0)
    given = padded([9] if rows == 1 else [5, 9, 7])
    expected = target.generate(**given, **call, do_sample=False).tolist()
    device.put(target)
    device.put(model)
    for draft in (model, "lookup"):
        if draft == "lookup" and way in ("confidence", "entropy"):
            continue
        with specplug.attach(target, draft, **WAYS[way]) as plugin:
            for _ in range(2):
                assert target.generate(**there(given), **call, do_sample=False).tolist() == expected
            sampled = target.generate(**there(given), **call, **SAMPLED)
            keyed = target.generate(**there(given), **call, **SAMPLED, specplug={"seed": 5})
            again = target.generate(**there(given), **call, **SAMPLED, specplug={"seed": 5})
            assert sampled.shape == keyed.shape and keyed.tolist() == again.tolist()
            assert plugin.stats.num_calls == 5


def test_the_verdict_is_asked_for_before_the_next_drafts_are(device, monkeypatch):
    """The host waits for what the device was given before; drafts that come first would be waited for too."""
    target, model = models()
    expected = target.generate(prompt(9), max_new_tokens=24, do_sample=False).tolist()
    device.put(target)
    device.put(model)
    done, begin = [], FixedDraft.begin
    with specplug.attach(target, model, gamma=3, engine="rounds") as plugin:
        for number in range(2):  # the first call also looks whether the models can be served
            if number == 1:
                for name in ("record", "synchronize"):
                    own = getattr(Event, name)
                    monkeypatch.setattr(Event, name, lambda *args, name=name, own=own: (done.append(name), own(*args)))
                monkeypatch.setattr(FixedDraft, "begin", lambda *args: (done.append("begin"), begin(*args)))
            found = target.generate(prompt(9).to(CUDA), max_new_tokens=24, do_sample=False)
        assert plugin.last.num_rounds > 3
    assert found.tolist() == expected
    in_rounds = 3 * (plugin.last.num_rounds + 1)
    assert done[:in_rounds] == ["record", "begin", "synchronize"] * (plugin.last.num_rounds + 1)
    assert done[in_rounds:] == [
        "record",
        "record",
    ]  # behind the call, for the next that gets the buffers of either model


def test_what_is_read_before_it_is_there_is_not_what_it_will_be(device):
    read = Read(torch.arange(3, device=CUDA))
    assert not device.waits and read.values.tolist() == [-7] * 3
    assert read.tolist() == [0, 1, 2] and device.waits == ["an event"]


@pytest.mark.parametrize(("draft", "rows"), [("model", 1), ("model", 3), ("lookup", 1)])
def test_seconds_of_passes_are_the_devices_and_nobody_waits_for_them(device, draft, rows):
    target, model = models()
    device.put(target)
    given, call = (
        there(padded([9] if rows == 1 else [5, 9, 7])),
        dict(max_new_tokens=18, do_sample=False, pad_token_id=0),
    )
    drafter = device.put(model) if draft == "model" else draft
    with specplug.attach(target, drafter, gamma=3, engine="rounds") as plugin:
        plugin.synchronize = True
        waits, _ = waits_a_round(device, plugin, lambda: target.generate(**given, **call))
        last = plugin.last
    assert waits == 1
    assert last.seconds_target > 0 and (last.seconds_draft_forward > 0) == (draft == "model")
    assert last.seconds_other > 0


@pytest.mark.parametrize("verify", ["block", "token"])
@pytest.mark.parametrize("rows", [1, 3])
def test_sampling_by_deterministic_algorithms(device, verify, rows):
    """Of which CUDA has none for running sums; as transformers' own loop, which needs none, ours goes on."""
    target, model = models()
    device.put(target)
    given, call = there(padded([9] if rows == 1 else [5, 9, 7])), dict(do_sample=True, top_k=20, pad_token_id=0)
    torch.use_deterministic_algorithms(True)
    try:
        with specplug.attach(target, device.put(model), gamma=3, engine="rounds", verify=verify) as plugin:
            assert target.generate(**given, **call, max_new_tokens=12).shape == (rows, 21)
        assert plugin.last.num_accepted > 0
    finally:
        torch.use_deterministic_algorithms(False)


def test_what_a_call_may_ask_for(device):
    target, model = models()
    ids = prompt(9)
    call = dict(
        max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_scores=True, output_logits=True
    )
    expected = target.generate(ids, **call)
    device.put(target)
    with specplug.attach(target, device.put(model), gamma=3, engine="rounds"):
        heard = []
        streamer = types.SimpleNamespace(put=lambda each: heard.extend(each.reshape(-1).tolist()), end=lambda: None)
        for number in (1, 2, 3):
            found = target.generate(ids.to(CUDA), **call, streamer=streamer)
            assert found.sequences.tolist() == expected.sequences.tolist()
            assert heard == number * found.sequences.tolist()[0]
            for ours, theirs in zip(found.scores, expected.scores, strict=True):
                assert isinstance(ours, OnDevice) and torch.allclose(ours.inner, theirs, atol=1e-3)
    # The cache is handed back as plain decoding leaves it, and goes on.
    longer = found.sequences.cpu()
    more = target.generate(found.sequences, max_new_tokens=4, do_sample=False, **{NAME: found[NAME]})
    assert isinstance(more, OnDevice) and more.tolist()[0][: longer.shape[1]] == longer.tolist()[0]


def test_the_script_for_a_gpu_finds_nothing_wrong(device, monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "gpu"))
    import check

    monkeypatch.setattr(launches, "_profiled", lambda device_type: contextlib.nullcontext())
    monkeypatch.setattr(launches, "_launches", lambda profiler, device_type: 0)
    given = "--device=cuda:0", "--tokens=6", "--repeats=1", "--rows=2"
    monkeypatch.setattr(sys, "argv", ["check.py", str(tmp_path / "check.json"), *given])
    code = check.main()
    found = json.loads((tmp_path / "check.json").read_text())
    assert code == 0 and found["problems"] == [] and found["graphs"] > 0, found["problems"]


def test_a_pipeline_leaves_the_target_where_it_was_asked_for(device):
    pipe = specplug.pipeline("target.device=cuda:0", "draft=lookup", "sampling.max_new_tokens=4")
    assert pipe.device == pipe.model.device == CUDA
    assert pipe("The cat")[0]["generated_text"] and specplug.attached(pipe).last.engine == "rounds"


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("method", "expected_waits"), [("intersection", 1), ("string", 2)])
def test_a_draft_with_another_tokenizer(device, method, expected_waits, rows):
    """What it says by string has to be read, to be cut anew."""
    target, _ = models()
    draft = make_model(seed=5).requires_grad_(False)
    alphabet = [chr(ord("0") + number) for number in range(64)]
    call = dict(max_new_tokens=18, pad_token_id=0, do_sample=False)
    given = padded([9] if rows == 1 else [5, 9, 7])
    expected = target.generate(**given, **call).tolist()
    device.put(target)
    device.put(draft)
    drafter = CrossVocabDrafter(draft, letters(alphabet[::-1]), letters(alphabet), method)
    with specplug.attach(target, drafter, gamma=3, engine="rounds") as plugin:
        waits, found = waits_a_round(device, plugin, lambda: target.generate(**there(given), **call))
        assert any(program.graph for kept in fixed._IDLE[draft] for program in kept.programs.values())
        target.generate(**there(given), **call | SAMPLED)
        target.generate(**there(given), **call | SAMPLED, specplug={"seed": 5})
    assert found.tolist() == expected
    assert (
        expected_waits - 0.2 < waits <= expected_waits
    )  # where there is no room left for drafts there are none to read
