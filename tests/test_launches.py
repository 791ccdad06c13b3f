"""Host reads and launches of a round: what is counted, that it is all put back, and what our loop asks for."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from conftest import make_model, noisy_copy, prompt

import specplug
from specplug import launches
from specplug.schedule import AdaptiveSchedule, FixedSchedule

READS = {
    "item": lambda x: x.item(),
    "tolist": lambda x: x.tolist(),
    "if": lambda x: 1 if x else 0,
    "int": int,
    "float": float,
    "index": lambda x: [1, 2, 3][x],
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "in": lambda x: 2 in x,
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),  # noqa: PLW0108 - looked up when it is called
    "equal": lambda x: torch.equal(x, x),
    "mask": lambda x: x[x > 0],
    "masks": lambda x: x[None][:, x > 0],
    "unique": lambda x: torch.unique(x),  # noqa: PLW0108
    "format": lambda x: f"{x:d}",
}


@pytest.mark.parametrize("name", READS)
def test_what_would_wait_for_a_device_is_counted_once(name):
    x = (
        torch.tensor(2)
        if name not in ("in", "nonzero", "mask", "masks", "unique", "torch.nonzero")
        else torch.tensor([2, 0])
    )
    with launches.host_reads("cpu") as reads:
        READS[name](x)
        assert reads() == 1


def test_what_stays_on_the_device_is_not_counted():
    x = torch.arange(6).view(2, 3)
    with launches.host_reads("cpu") as reads:
        _ = x[0], x[:, 1:], x[torch.tensor([1])], x.argmax(-1), torch.where(x > 1, x, 0), x.shape[0], len(x), x + 1
        assert reads() == 0


def test_everything_is_put_back():
    before = dict(vars(torch.Tensor)), dict(vars(torch))
    with pytest.raises(KeyError), launches.host_reads("cpu"):
        raise KeyError
    assert before == (dict(vars(torch.Tensor)), dict(vars(torch)))


def counted(schedule, graph="off", rows=1, **more):
    torch.manual_seed(0)
    target = make_model()
    ids = torch.cat([prompt(seed=seed) for seed in range(rows)])
    call = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None} | more
    with specplug.attach(target, noisy_copy(target), schedule=schedule, graph=graph) as plugin:
        plugin.record_after = 0
        target.generate(ids, **call)
        target.generate(ids, **call)
        plugin.record_after = 1 << 30
        found = launches.count(lambda: target.generate(ids, **call), schedule, "cpu")
        assert "observe" not in vars(schedule) and "start" not in vars(schedule)
        return found, plugin.last


def test_a_round_reads_once_and_a_replayed_pass_is_one_launch():
    found, last = counted(FixedSchedule(3))
    assert found.num_rounds == last.num_rounds - 1 > 3 and found.host_reads == found.num_rounds
    replayed, _ = counted(FixedSchedule(3), graph="capture")
    assert replayed[:2] == found[:2]
    # Four passes of two layers: at least a dozen operations a layer are gone, and those around them are what is left.
    assert replayed.launches < found.launches - 4 * 2 * 12 * found.num_rounds


def test_a_read_more_is_found(monkeypatch):
    """The negative control: a loop that looks once more at what the device has computed."""
    from specplug.round import Text

    right, commit = counted(FixedSchedule(0))[0], Text.commit

    def reading(text, token):
        commit(text, token)
        text.ids.max().item()

    monkeypatch.setattr(Text, "commit", reading)
    found = counted(FixedSchedule(0))[0]
    assert found.host_reads == right.host_reads + found.num_rounds and found.launches > right.launches


def test_other_schedules_and_batches_are_counted_by_passes():
    found, last = counted(AdaptiveSchedule(2))
    assert found.num_rounds == last.num_rounds - 1
    found, last = counted(FixedSchedule(0), rows=3)
    assert found.num_rounds == 22 and last.num_rounds == 3 * 23


def test_a_call_without_rounds_has_nothing_to_count():
    assert counted(FixedSchedule(0), max_new_tokens=1)[0] is None


def test_on_cuda_the_warnings_of_torch_are_counted(monkeypatch):
    """With the calls that need a device in its place."""
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "Event", type("Event", (), {"synchronize": lambda self: None}))
    with launches.host_reads("cuda") as reads:
        for text in (
            "called a synchronizing CUDA operation",
            "something else",
            "called a synchronizing CUDA operation",
        ):
            warnings.warn(text, stacklevel=1)
        assert reads() == 2
        torch.cuda.Event().synchronize()
        assert reads() == 3
    torch.cuda.Event().synchronize()
    assert modes == [0, "warn", 0] and reads() == 3


def event(name, start, duration):
    return SimpleNamespace(name=lambda: name, start_ns=lambda: start, duration_ns=lambda: duration)


def test_launches_between_the_marks():
    events = [
        event("aten::mul", 0, 5),
        event(launches.MARK, 10, 2),
        event("aten::linear", 20, 30),
        event("aten::addmm", 25, 10),  # part of it
        event("cudaLaunchKernel", 27, 1),
        event(launches.MARK, 60, 2),
        event("forward", 70, 20),  # a replay
        event("cudaGraphLaunch_v10000", 75, 5),
        event("cudaDeviceSynchronize", 85, 5),
        event(launches.MARK, 100, 2),
        event("cudaLaunchKernel", 110, 1),
    ]
    profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    assert launches._launches(profiler, "cpu") == 2
    assert launches._launches(profiler, "cuda") == 2
