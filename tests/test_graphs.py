"""What is asked of CUDA to capture a program, and what is put right where that fails: on a fake of torch.cuda, since there is no device."""

import contextlib

import pytest
import torch

from specplug import graphs


class Fake:
    """Streams that are current, captures that end as they are told, and what torch would leave open."""

    def __init__(self, monkeypatch):
        self.current, self.index, self.log, self.fails = "default", 0, [], False
        self.generator_open, self.pools_open, self.own = False, [], None
        for name in ("device", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.index)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(self, self.current))
        monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(self, f"side of {self.index}"))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, len(self.log)))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.close_pool, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *_: self.log.append("release"), raising=False)
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: self.log.append("clear"), raising=False)
        monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
        monkeypatch.setattr(graphs, "_STREAMS", {}, raising=False)
        monkeypatch.setattr(graphs, "_FAILED", [], raising=False)

    @contextlib.contextmanager
    def device(self, device):
        before, self.index = self.index, device.index
        try:
            yield
        finally:
            self.index = before

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph, pool=None, stream=None, capture_error_mode=None):
        """As torch's: with one stream for all devices, made at the first; where the end of the capture raises, nothing behind it
        is done."""
        assert not torch.is_inference_mode_enabled() and not torch.is_grad_enabled()
        self.own = self.own or Stream(self, f"torch's, of {self.index}")
        stream = stream or self.own
        self.current, self.generator_open = stream.name, True
        self.pools_open.append(pool)
        self.log.append(("capture on", stream.name))
        with contextlib.suppress(RuntimeError):
            yield
        if self.fails:
            self.fails = False
            raise RuntimeError("operation failed due to a previous error during capture")
        self.generator_open = False
        self.pools_open.remove(pool)
        self.current = "default"

    def close_pool(self, device, pool):
        if pool not in self.pools_open:
            raise RuntimeError("not currently recording to mempool_id")
        self.pools_open.remove(pool)


class Stream:
    def __init__(self, fake, name):
        self.fake, self.name = fake, name

    def wait_stream(self, other):
        self.fake.log.append((self.name, "waits for", other.name))


class Graph:
    def replay(self):
        assert torch.is_inference_mode_enabled()


@pytest.fixture
def cuda(monkeypatch):
    return Fake(monkeypatch)


def test_each_device_is_captured_on_a_stream_of_its_own(cuda):
    ran = []
    with torch.inference_mode():  # as drafts are made
        for index in (0, 1, 1):
            graph = graphs.CudaGraph(lambda: ran.append(cuda.current), torch.device("cuda", index), {})
            graph()
    assert ran == ["side of 0"] * 3 + ["side of 1"] * 6
    assert cuda.log[:5] == [
        ("side of 0", "waits for", "default"),
        ("default", "waits for", "side of 0"),
        "clear",  # so that workspaces are the graph's own
        ("capture on", "side of 0"),
        "clear",
    ]
    assert cuda.current == "default" and cuda.index == 0


def test_a_capture_that_fails_leaves_nothing_open(cuda):
    runs = []

    def program():
        runs.append(cuda.current)
        if len(runs) == 3:
            cuda.fails = True
            raise RuntimeError("operation not permitted when stream is capturing")

    with torch.no_grad(), pytest.raises(RuntimeError, match="not permitted"):
        graphs.CudaGraph(program, torch.device("cuda", 0), {})
    assert cuda.current == "default" and not cuda.pools_open and not cuda.generator_open
    assert cuda.log.count("release") == 1 and len(graphs._FAILED) == 1
    graphs.CudaGraph(program, torch.device("cuda", 0), {})  # and the next one finds all in order
    assert len(runs) == 6


def test_a_program_that_fails_before_the_capture_is_waited_for(cuda):
    def program():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        graphs.CudaGraph(program, torch.device("cuda", 0), {})
    assert cuda.log == [("side of 0", "waits for", "default"), ("default", "waits for", "side of 0")]
    assert cuda.current == "default" and not cuda.pools_open
