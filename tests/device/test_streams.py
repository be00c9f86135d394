"""Streams and memory of devices: copies at once, copies deferred until waited for, and CUDA's."""

import sys
import threading
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from nanovllm import ConfigError
from nanovllm.device import HazardError, Span, create_device, free_host_bytes, host
from nanovllm.device.hazards import CheckedStream

SLOT = Span("slot", 0, 1)
GIB = 1 << 30


@pytest.fixture
def inline(monkeypatch):
    monkeypatch.delenv("NANOVLLM_CHECK_STREAMS", raising=False)
    return create_device("cpu")


@pytest.fixture
def deferred(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")
    return create_device("cpu")


@pytest.fixture
def data():
    """A source, and a target that holds something else."""
    return torch.arange(8.0), torch.full((8,), -1.0)


@pytest.mark.parametrize("setting", [None, "", "0", "1"])
def test_streams_are_checked_where_the_environment_says_so(monkeypatch, setting):
    if setting is None:
        monkeypatch.delenv("NANOVLLM_CHECK_STREAMS", raising=False)
    else:
        monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", setting)
    device = create_device("cpu")
    checked = setting == "1"
    assert isinstance(device.new_stream("x"), CheckedStream) == checked
    assert isinstance(device.compute_stream, CheckedStream) == checked


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_refused():
    assert create_device("auto").torch_device.type == "cpu"
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        create_device("cuda")
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        create_device("cuda:1")


def test_an_inline_stream_copies_at_once(inline, data):
    source, target = data
    stream = inline.new_stream("x")
    before = stream.record(timed=True)
    stream.copy(target, source, reads=SLOT, writes=SLOT)
    assert torch.equal(target, source)
    after = stream.record(timed=True)
    assert before.is_done()
    assert after.is_done()
    assert after.ms_since(before) > 0


def test_an_inline_device_checks_and_poisons_nothing(inline, data):
    _, target = data
    inline.touch(reads=SLOT)
    inline.host_reads(SLOT)
    inline.new_stream("x").discard(target, SLOT)
    assert torch.equal(target, torch.full((8,), -1.0))


def test_a_deferred_stream_copies_when_the_host_waits(deferred, data):
    source, target = data
    stream = deferred.new_stream("x")
    before = stream.record()
    stream.copy(target, source)
    after = stream.record()
    assert before.is_done()
    assert not after.is_done()
    before.synchronize()
    assert target.eq(-1).all()
    after.synchronize()
    assert after.is_done()
    assert torch.equal(target, source)


def test_a_deferred_stream_copies_no_more_than_is_waited_for(deferred):
    stream = deferred.new_stream("x")
    targets = torch.zeros(4)
    points = []
    for i in range(4):
        stream.copy(targets[i], torch.tensor(i + 1.0))
        points.append(stream.record())
    points[1].synchronize()
    assert targets.tolist() == [1, 2, 0, 0]
    points[0].synchronize()
    assert targets.tolist() == [1, 2, 0, 0]
    points[3].synchronize()
    assert targets.tolist() == [1, 2, 3, 4]


def test_a_deferred_copy_takes_what_is_there_when_it_runs(deferred, data):
    """So that a source that is overwritten too early shows."""
    source, target = data
    stream = deferred.new_stream("x")
    stream.copy(target, source)
    source.zero_()
    stream.record().synchronize()
    assert target.eq(0).all()


def test_the_compute_stream_makes_deferred_copies_run(deferred, data):
    source, target = data
    stream = deferred.new_stream("x")
    stream.copy(target, source)
    deferred.compute_stream.wait(stream.record())
    assert torch.equal(target, source)


def test_streams_that_wait_for_each_other(deferred):
    """A value goes to and fro between two streams; only the last point is waited for."""
    there, back = deferred.new_stream("there"), deferred.new_stream("back")
    cells = torch.zeros(7)
    cells[0] = 5
    streams = [there, back] * 3
    for i, stream in enumerate(streams):
        stream.copy(cells[i + 1], cells[i])
        point = stream.record()
        streams[(i + 1) % 6].wait(point)
    assert cells.tolist() == [5, 0, 0, 0, 0, 0, 0]
    point.synchronize()
    assert cells.tolist() == [5] * 7


def test_a_wait_holds_up_later_work_only(deferred):
    first, second = deferred.new_stream("first"), deferred.new_stream("second")
    cells = torch.zeros(2)
    second.copy(cells[0], torch.tensor(1.0))
    before = second.record()
    first.copy(cells[1], torch.tensor(2.0))
    second.wait(first.record())
    after = second.record()
    before.synchronize()
    assert cells.tolist() == [1, 0]
    assert not after.is_done()
    after.synchronize()
    assert cells.tolist() == [1, 2]


def test_synchronize_runs_all(deferred):
    streams = [deferred.new_stream(name) for name in "abc"]
    cells = torch.zeros(3)
    for i, stream in enumerate(streams):
        stream.copy(cells[i], torch.tensor(1.0), writes=Span("slot", i, 1))
    point = streams[2].record()
    streams[0].wait(point)
    deferred.synchronize()
    assert cells.tolist() == [1, 1, 1]
    assert all(stream.record().is_done() for stream in streams)
    deferred.host_reads(Span("slot", 0, 3))


def test_control_without_synchronize_the_host_may_not_read(deferred, data):
    source, target = data
    deferred.new_stream("x").copy(target, source, writes=SLOT)
    with pytest.raises(HazardError):
        deferred.host_reads(SLOT)


def test_what_is_discarded_is_poisoned(deferred, data):
    source, target = data
    deferred.new_stream("x").discard(target, SLOT)
    assert target.isnan().all()
    assert not source.isnan().any()


def test_discarding_is_a_write(deferred, data):
    _, target = data
    deferred.new_stream("x").discard(target, SLOT)
    with pytest.raises(HazardError):
        deferred.new_stream("y").discard(target, SLOT)


def test_copies_are_checked_for_both_their_buffers(deferred, data):
    source, target = data
    x, y, z = (deferred.new_stream(name) for name in "xyz")
    x.copy(target, source, writes=SLOT)
    with pytest.raises(HazardError, match="y reads slot 0"):
        y.copy(source, target, reads=SLOT)
    with pytest.raises(HazardError, match="z writes slot 0"):
        z.copy(target, source, writes=SLOT)


@pytest.mark.parametrize("entered", ["compute", "x", None])
def test_kernels_are_checked_on_the_current_stream(deferred, data, entered):
    """Who waits is the compute stream; kernels elsewhere have not waited."""
    source, target = data
    stream = deferred.new_stream("copies")
    stream.copy(target, source, writes=SLOT)
    deferred.compute_stream.wait(stream.record())
    if entered == "compute":
        with deferred.active():
            deferred.touch(reads=SLOT)
    elif entered is None:
        with pytest.raises(HazardError, match="default reads"):
            deferred.touch(reads=SLOT)
    else:
        other = deferred.new_stream(entered)
        with (
            deferred.active(),
            other.entered(),
            pytest.raises(HazardError, match="x reads"),
        ):
            deferred.touch(reads=SLOT)


def test_the_stream_before_is_current_again(deferred):
    other = deferred.new_stream("x")
    with deferred.active():
        with suppress(ZeroDivisionError), other.entered():
            raise ZeroDivisionError
        assert deferred._current_stream_name() == "compute"
    assert deferred._current_stream_name() == "default"


def test_looking_whether_a_measurement_is_over_orders_nothing(deferred):
    """On a CPU kernels are done at once: looking would hide that nobody waits for them."""
    with deferred.active():
        deferred.touch(writes=SLOT)
    assert deferred.compute_stream.record(timed=True).is_done()
    copies = deferred.new_stream("x")
    with pytest.raises(HazardError):
        copies.copy(torch.zeros(1), torch.zeros(1), reads=SLOT)
    assert deferred.compute_stream.record().is_done()
    copies.copy(torch.zeros(1), torch.zeros(1), reads=SLOT)


def test_two_threads_may_use_streams_at_once(monkeypatch):
    """As the host pool's thread measures while the engine runs, and the device waits for all."""
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")
    failures, together = [], threading.Barrier(2)

    def copy_some(device, name):
        try:
            together.wait()
            for i in range(50):
                span, cell = Span((name, 0), i, 1), torch.zeros(())
                stream = device.new_stream(f"{name} {i}")
                stream.copy(cell, torch.ones(()), writes=span)
                if i % 2:
                    stream.record().synchronize()
                else:
                    device.synchronize()
                device.host_reads(span)
                assert cell == 1
        except Exception as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(6):
            device = create_device("cpu")
            thread = threading.Thread(target=copy_some, args=[device, "probe"])
            thread.start()
            copy_some(device, "engine")
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failures


@pytest.mark.parametrize("which", ["target", "source"])
def test_a_copy_between_tensors_with_gaps_is_refused(which):
    """PyTorch would read strided host memory when it is called, and not in the stream's turn."""
    stream = create_device("cpu").new_stream("x")
    tensors = {"target": torch.ones(4), "source": torch.zeros(4)}
    tensors[which] = torch.full((8,), 2.0)[::2]
    with pytest.raises(ValueError, match="must be contiguous"):
        stream.copy(tensors["target"], tensors["source"])


def test_a_copy_that_another_thread_makes_is_waited_for(deferred):
    begun, go, seen = threading.Event(), threading.Event(), []

    class Slow:
        copied = False

        def is_contiguous(self):
            return True

        def copy_(self, source):
            begun.set()
            go.wait()
            self.copied = True

    def wait_for_the_copy():
        stream.record().synchronize()
        seen.append(target.copied)

    stream, target = deferred.new_stream("x"), Slow()
    stream.copy(target, torch.zeros(1))
    threads = [threading.Thread(target=wait) for wait in (deferred.synchronize, wait_for_the_copy)]
    threads[0].start()
    begun.wait()
    threads[1].start()
    threads[1].join(0.1)  # time to go wrong in
    go.set()
    for thread in threads:
        thread.join()
    assert seen == [True]


@pytest.fixture
def files(monkeypatch):
    """What the system says of its memory: 8 GiB are available, and there is no limit."""
    files = {"/proc/meminfo": ["MemTotal: 99999999 kB", f"MemAvailable: {8 << 20} kB"]}
    monkeypatch.setattr(host, "read_lines", lambda path: files.get(path, []))
    return files


def set_limit(files, limit, used, inactive_file=None):
    files["/sys/fs/cgroup/memory.max"] = [str(limit)]
    files["/sys/fs/cgroup/memory.current"] = [str(used)]
    if inactive_file is not None:
        stat = ["file 999999", f"inactive_file {inactive_file}", "active_file 999999"]
        files["/sys/fs/cgroup/memory.stat"] = stat


def test_free_host_memory_without_a_limit(files):
    assert free_host_bytes() == 8 * GIB
    set_limit(files, "max", GIB)
    assert free_host_bytes() == 8 * GIB


def test_free_host_memory_under_a_limit(files):
    set_limit(files, 6 * GIB, GIB)
    assert free_host_bytes() == 5 * GIB
    set_limit(files, 16 * GIB, GIB)
    assert free_host_bytes() == 8 * GIB
    set_limit(files, GIB, 2 * GIB)
    assert free_host_bytes() == 0


def test_files_that_a_container_has_read_do_not_count_as_used(files):
    set_limit(files, 6 * GIB, 4 * GIB, inactive_file=3 * GIB)
    assert free_host_bytes() == 5 * GIB


def test_free_host_memory_where_the_system_says_nothing(files):
    files.clear()
    assert free_host_bytes() == host.total_host_bytes()


def test_free_host_memory_of_this_machine():
    assert 0 < free_host_bytes() <= host.total_host_bytes()


def test_files_that_are_not_there_have_no_lines(tmp_path):
    (tmp_path / "two").write_text("one\ntwo\n")
    assert host.read_lines(str(tmp_path / "two")) == ["one", "two"]
    assert host.read_lines(str(tmp_path / "none")) == []


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.delenv("NANOVLLM_CHECK_STREAMS", raising=False)
    return create_device("cuda")


def register(tensor):
    """Pin a tensor, and return whether CUDA took it. Leaves no error behind."""
    result = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
    if result:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
    return result == 0


@pytest.mark.gpu
def test_host_memory_is_pinned_until_it_is_released(cuda):
    memory = cuda.allocate_host((3, 1 << 20), torch.bfloat16)
    assert memory.is_pinned
    assert memory.tensor.shape == (3, 1 << 20)
    assert memory.tensor.dtype == torch.bfloat16
    assert not register(memory.tensor)  # it is already
    memory.release()
    assert register(memory.tensor)
    torch.cuda.cudart().cudaHostUnregister(memory.tensor.data_ptr())


@pytest.mark.gpu
def test_memory_that_cannot_be_pinned_comes_unpinned_and_leaves_no_error(cuda, monkeypatch):
    runtime = torch.cuda.cudart()

    def register_twice(*args):
        runtime.cudaHostRegister(*args)
        return runtime.cudaHostRegister(*args)

    with monkeypatch.context() as patch:
        refusing = SimpleNamespace(
            cudaHostRegister=register_twice, cudaHostUnregister=runtime.cudaHostUnregister
        )
        patch.setattr(torch.cuda, "cudart", lambda: refusing)
        memory = cuda.allocate_host((1 << 20,), torch.float32)
    assert not memory.is_pinned
    # An error that was left would be raised by the next launch.
    assert torch.ones(8, device="cuda").sum().item() == 8
    cuda.new_stream("x").copy(torch.empty(1 << 20, device="cuda"), memory.tensor)
    cuda.synchronize()
    memory.release()
    runtime.cudaHostUnregister(memory.tensor.data_ptr())


@pytest.mark.gpu
def test_copies_to_the_device_and_back(cuda):
    there, back = cuda.new_stream("there"), cuda.new_stream("back")
    source, target = (cuda.allocate_host((1 << 20,), torch.float32) for _ in range(2))
    source.tensor.copy_(torch.arange(1 << 20))
    device_tensor = torch.empty(1 << 20, device="cuda")
    cuda.synchronize()
    there.copy(device_tensor, source.tensor)
    cuda.compute_stream.wait(there.record())
    with cuda.active():
        device_tensor += 1
    back.wait(cuda.compute_stream.record())
    back.copy(target.tensor, device_tensor)
    back.record().synchronize()
    assert torch.equal(target.tensor, source.tensor + 1)
    source.release()
    target.release()


@pytest.mark.gpu
def test_events_measure_time(cuda):
    host_tensor = cuda.allocate_host((1 << 26,), torch.uint8)
    stream = cuda.new_stream("x")
    before = stream.record(timed=True)
    stream.copy(torch.empty(1 << 26, dtype=torch.uint8, device="cuda"), host_tensor.tensor)
    after = stream.record(timed=True)
    after.synchronize()
    assert before.is_done()
    assert after.is_done()
    assert after.ms_since(before) > 0
    assert before.ms_since(before) == 0
    host_tensor.release()


@pytest.mark.gpu
def test_the_current_stream_has_a_name(cuda):
    other = cuda.new_stream("x")
    assert cuda._current_stream_name() == "default"
    with cuda.active():
        assert cuda._current_stream_name() == "compute"
        with other.entered():
            assert cuda._current_stream_name() == "x"
        assert cuda._current_stream_name() == "compute"
    assert cuda._current_stream_name() == "default"


@pytest.mark.gpu
def test_cuda_streams_are_checked_and_poisoned(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", "1")
    device = create_device("cuda")
    slot, source = torch.zeros(8, device="cuda"), device.allocate_host((8,), torch.float32)
    source.tensor.fill_(3)
    device.synchronize()
    stream = device.new_stream("x")
    stream.discard(slot, SLOT)
    device.synchronize()
    assert slot.isnan().all()
    stream.copy(slot, source.tensor, writes=SLOT)
    with device.active(), pytest.raises(HazardError, match="compute reads"):
        device.touch(reads=SLOT)
    device.compute_stream.wait(stream.record())
    with pytest.raises(HazardError, match="default reads"):
        device.touch(reads=SLOT)
    with device.active():
        device.touch(reads=SLOT)
        assert slot.tolist() == [3] * 8
    source.release()
