"""A short soak, and that it finds what it looks for; see soak.py, which is a command too."""

import json
import logging
import os
import sys
import threading

import pytest
import soak
import transformers

import specplug
from specplug import hook
from specplug.cache import NAME

QUICK = 30  # calls


@pytest.fixture(autouse=True)
def quiet():
    logger, verbosity = logging.getLogger("specplug"), transformers.logging.get_verbosity()
    before = logger.level
    soak.quiet()
    yield
    logger.setLevel(before)  # other tests read what is logged
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def test_nothing_grows():
    found = soak.run(150, 0)
    assert not found["grown"], json.dumps(found)
    assert found["engines"]["rounds"] > 30 and found["engines"]["lookahead"] > 30
    assert found["outcomes"]["interrupted"] > 15 and found["outcomes"]["done, two at once"] > 5


KEPT: list = []


class Leaking(specplug.SpeculativeProcessor):
    """Serves as ever, and leaves something behind with every call."""

    def serve(self, model, plain, *args, **kwargs):
        self.leak(model, kwargs)
        return super().serve(model, plain, *args, **kwargs)


class KeepsCaches(Leaking):
    def leak(self, model, kwargs):
        KEPT.append(kwargs[NAME])


class KeepsObjects(Leaking):
    def leak(self, model, kwargs):
        KEPT.append([[number] for number in range(100)])


class LeavesHooks(Leaking):
    def leak(self, model, kwargs):
        model.register_forward_hook(lambda *_: None)


class NeverEnds(Leaking):
    def leak(self, model, kwargs):
        hook.begin_call(model)


class OpensFiles(Leaking):
    def leak(self, model, kwargs):
        KEPT.append(open(os.devnull))  # noqa: SIM115


class StartsThreads(Leaking):
    def leak(self, model, kwargs):
        KEPT.append(threading.Event())
        threading.Thread(target=KEPT[-1].wait, daemon=True).start()


@pytest.mark.parametrize(
    ("plugin_class", "what"),
    [
        (KeepsCaches, ["tensors", "tensor_bytes"]),
        (KeepsObjects, ["objects"]),
        (LeavesHooks, ["hooks"]),
        (NeverEnds, ["classes_changed", "live_calls"]),
        (OpensFiles, ["open_files"]),
        (StartsThreads, ["threads", "system_threads"]),
    ],
)
def test_what_is_left_behind_is_found(plugin_class, what):
    try:
        found = soak.run(QUICK, 1, plugin_class, ["llama"])["grown"]
    finally:
        for each in KEPT:
            if isinstance(each, threading.Event):
                each.set()
            elif hasattr(each, "close"):
                each.close()
        KEPT.clear()
    assert set(what) <= set(found), found


def test_a_clean_plugin_leaves_nothing_in_so_few_calls():
    assert not soak.run(QUICK, 1, names=["llama"])["grown"]


def test_too_few_calls_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["soak.py", "--calls", "3"])
    with pytest.raises(SystemExit):
        soak.main()
    assert "10 or more" in capsys.readouterr().err
