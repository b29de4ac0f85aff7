"""Ids that all processes compute alike, the client's header, the sampling rule, and what becomes of spans: files, a
collector, a full queue."""

from __future__ import annotations

import http.server
import importlib.util
import json
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from vla_common import span_queue
from vla_common.clock import ManualClock, SystemClock
from vla_common.config import ConfigError, from_mapping
from vla_common.span_file import SpanFile, read_spans
from vla_common.span_queue import SpanQueue, check_tracing, tracing
from vla_common.tracing import (
    Span,
    Tracer,
    TracingConfig,
    is_sampled,
    parse_traceparent,
    span_id,
    tick_trace,
    trace_id,
)

TRACE = bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736")
CALLER = bytes.fromhex("00f067aa0ba902b7")
HEADER = f"00-{TRACE.hex()}-{CALLER.hex()}-01"
HAS_OTEL = importlib.util.find_spec("opentelemetry") is not None


def span(number: int = 0, **changes: object) -> Span:
    fields = {"trace": TRACE, "id": span_id(TRACE, "s", number), "parent": CALLER, "name": "s", "begin_ns": 100,
              "end_ns": 250, "attributes": {"n": number}} | changes  # fmt: skip
    return Span(**fields)


class Kept:
    """An exporter that keeps what it is given, and fails when it is told to."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.offsets_ns: list[int] = []
        self.error: Exception | None = None
        self.may_go = threading.Event()
        self.may_go.set()
        self.closed = 0

    def export(self, spans: Sequence[Span], offset_ns: int) -> None:
        self.may_go.wait(10.0)
        if self.error is not None:
            raise self.error
        self.spans += spans
        self.offsets_ns.append(offset_ns)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _a_busy_machine_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_queue, "FAREWELL_S", 60.0)


# ids


def test_ids_are_what_they_were() -> None:
    """Another release of one of the processes must compute the same ones."""
    assert tick_trace("arm1", 123_456_789_012).hex() == "f32c8438ccb948a42f816097090cc73a"
    assert trace_id("chat", "run", 0, "r").hex() == "4df5d3a87edf350570728fae7f192265"
    assert span_id(TRACE, "attempt", 1).hex() == "dd9592cea1434dab"


def test_ids_differ_in_every_part() -> None:
    ids = {trace_id("a", 1), trace_id("a", 2), trace_id("b", 1), trace_id("a1"), trace_id("a", "1", ""), tick_trace("a", 1)}
    assert len(ids) == 6 and all(len(one) == 16 for one in ids)
    spans = {span_id(TRACE, "a"), span_id(TRACE, "a", 0), span_id(TRACE, "a", 1), span_id(TRACE, "b"), span_id(CALLER * 2, "a")}
    assert len(spans) == 5 and all(len(one) == 8 for one in spans)


def test_a_traceparent_of_the_standard() -> None:
    assert parse_traceparent(HEADER) == parse_traceparent(f" {HEADER}\t") == (TRACE, CALLER)
    assert parse_traceparent(HEADER[:-2] + "00") == (TRACE, CALLER), "the flag does not count"
    assert parse_traceparent("cc" + HEADER[2:] + "-what-comes-later") == (TRACE, CALLER), "a later version"
    assert parse_traceparent("cc" + HEADER[2:]) == (TRACE, CALLER)


@pytest.mark.parametrize(
    "wrong",
    [
        "", "00", HEADER[:-1], HEADER + "-", HEADER + "-01", "ff" + HEADER[2:], HEADER.upper(), HEADER.replace("-", "_"),
        HEADER.replace("4bf9", "4bg9"), f"00-{'0' * 32}-{CALLER.hex()}-01", f"00-{TRACE.hex()}-{'0' * 16}-01",
        "cc" + HEADER[2:] + "x", HEADER + "\n" + HEADER, "00-" + "١" * 32 + HEADER[35:], HEADER * 1000,
    ],
)  # fmt: skip
def test_a_malformed_traceparent_is_ignored(wrong: str) -> None:
    assert parse_traceparent(wrong) is None


# sampling


def test_the_share_is_that_of_the_traces_and_grows_with_it() -> None:
    traces = [tick_trace("arm1", number) for number in range(4000)]
    before: set[bytes] = set()
    for share in (0.0, 0.01, 0.25, 0.5, 1.0):
        chosen = {trace for trace in traces if is_sampled(trace, share)}
        assert before <= chosen, "a trace that a smaller share has is in a larger one"
        assert abs(len(chosen) / len(traces) - share) < 0.03
        before = chosen
    assert len(before) == len(traces)
    assert is_sampled(b"\xff" * 16, 1.0) and not is_sampled(bytes(16), 0.0)


@pytest.mark.skipif(not HAS_OTEL, reason="opentelemetry is not installed: pip install 'vla-runtime[otel]'")
def test_the_rule_is_that_of_opentelemetry() -> None:
    from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

    sampler = TraceIdRatioBased(0.3)
    for number in range(300):
        trace = tick_trace("arm1", number)
        found = sampler.should_sample(None, int.from_bytes(trace, "big"), "s")
        assert is_sampled(trace, 0.3) is (found.decision is Decision.RECORD_AND_SAMPLE)


# the queue


def test_a_full_queue_drops_and_counts_and_never_waits(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.may_go.clear()  # a collector that does not answer
    queue = SpanQueue(kept, ManualClock(), limit=10, period_s=0.001)
    queue.put(span(0))
    while queue._spans:  # its thread holds that one now
        pass
    with caplog.at_level(logging.WARNING):
        for number in range(1, 16):
            queue.put(span(number))
        assert queue.dropped == 5 and not kept.spans
        kept.may_go.set()
        queue.close()
        queue.close()
    assert [one.attributes["n"] for one in kept.spans] == list(range(11)) and kept.closed == 1 and queue.lost == 0
    assert "dropped as the queue was full: 5" in caplog.text


def test_the_end_of_a_process_does_not_wait_for_a_collector_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_queue, "FAREWELL_S", 0.01)
    kept = Kept()
    kept.may_go.clear()
    queue = SpanQueue(kept, ManualClock(), limit=10)
    queue.put(span(0))
    queue.close()
    assert not kept.closed and queue._thread.is_alive()
    kept.may_go.set()
    queue._thread.join()
    assert kept.closed == 1 and len(kept.spans) == 1


def test_a_failed_export_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    kept = Kept()
    kept.error = OSError("disk full")
    with caplog.at_level(logging.WARNING):
        queue = SpanQueue(kept, ManualClock(), limit=10, period_s=0.001)
        for number in range(3):
            queue.put(span(number))
            while queue.lost <= number:
                pass
        kept.error = None
        queue.put(span(3))
        queue.close()
    assert queue.lost == 3 and [one.attributes["n"] for one in kept.spans] == [3]
    assert caplog.text.count("disk full") == 1


class HeldUpOnce(ManualClock):
    """10 ms pass between the first reading of one clock and that of the other."""

    held_up = False

    def wall_ns(self) -> int:
        wall_ns = super().wall_ns()
        if not self.held_up:
            self.held_up = True
            self.advance_ns(10_000_000)
        return wall_ns


@pytest.mark.parametrize("make_clock", [ManualClock, HeldUpOnce])
def test_times_become_wall_clock_by_the_processs_own_clocks(make_clock: type[ManualClock]) -> None:
    kept, clock = Kept(), make_clock(start_ns=5_000, wall_ns=1_700_000_000_000_000_000)
    queue = SpanQueue(kept, clock, limit=10)
    Tracer(queue, 1.0).span(TRACE, CALLER, b"", "s", 4_000, 3_000, error="", n=1)
    queue.close()
    assert kept.offsets_ns == [1_700_000_000_000_000_000]
    assert (kept.spans[0].begin_ns, kept.spans[0].end_ns) == (4_000, 4_000), "never ends before it begins"


# files


def test_spans_come_back_from_their_file(tmp_path: Path) -> None:
    file = SpanFile.create(tmp_path, "vla-worker", "p0/1 é", 1 << 20)
    attributes = {"text": "a b", "whole": 2**62, "part": 0.5, "yes": True}
    file.export([span(0, attributes=attributes), span(1, error="UNAVAILABLE: gone", parent=b"")], 1_000)
    file.export([span(2)], 2_000)
    file.close()
    spans, unread = read_spans([tmp_path])
    assert unread == 0 and len(spans) == 3
    first, second, third = spans
    assert (first.trace, first.id, first.parent) == (TRACE.hex(), span_id(TRACE, "s", 0).hex(), CALLER.hex())
    assert (first.begin_ns, first.end_ns, third.begin_ns) == (1_100, 1_250, 2_100)
    assert first.attributes == attributes and isinstance(first.attributes["yes"], bool)
    assert (first.service, first.instance, first.error) == ("vla-worker", "p0/1 é", "")
    assert (second.error, second.parent) == ("UNAVAILABLE: gone", "")
    assert read_spans([file.path, tmp_path]) == (spans, 0), "each span once"


def test_what_a_killed_process_left_is_read(tmp_path: Path) -> None:
    file = SpanFile.create(tmp_path, "vla-io", "arm1", 1 << 20)
    file.export([span(0)], 0)
    file.close()
    whole = file.path.read_bytes()
    (tmp_path / "cut.jsonl").write_bytes(whole + whole[:-40])
    (tmp_path / "other.jsonl").write_bytes(b'{"resourceSpans": 3}\n[]\n\xff\xfe\n{"a": 1}\n')
    spans, unread = read_spans([tmp_path])
    assert len(spans) == 1 and unread == 5
    with pytest.raises(FileNotFoundError):
        read_spans([tmp_path / "none.jsonl"])


def test_a_file_is_bounded(tmp_path: Path) -> None:
    file = SpanFile.create(tmp_path, "vla-io", "arm1", 2_000)
    for number in range(60):
        file.export([span(number)], 0)
    file.close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [file.path.name, file.path.name + ".1"]
    assert all(path.stat().st_size < 3_000 for path in tmp_path.iterdir())
    spans, unread = read_spans([tmp_path])
    assert unread == 0 and "59" in {str(one.attributes["n"]) for one in spans}


# configuration


def test_off_means_no_tracer_no_thread_and_no_file(tmp_path: Path) -> None:
    threads = threading.active_count()
    with tracing(TracingConfig(folder=str(tmp_path / "t")), "vla-io", "arm1", SystemClock()) as tracer:
        assert tracer is None and threading.active_count() == threads
    assert not (tmp_path / "t").exists()


def test_on_means_a_file_for_each_process(tmp_path: Path) -> None:
    config = TracingConfig(sample=1.0, folder=str(tmp_path / "a" / "b"))
    for name in ("p0.1", "d0.1"):
        with tracing(config, "vla-worker", name, SystemClock()) as tracer:
            assert tracer is not None and tracer.samples(TRACE)
            tracer.span(TRACE, span_id(TRACE, name), b"", "s", 1, 2)
    spans, _ = read_spans([tmp_path / "a" / "b"])
    assert {one.instance for one in spans} == {"p0.1", "d0.1"} and len(list((tmp_path / "a" / "b").iterdir())) == 2


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"sample": 1.5}, "sample must be 0"),
        ({"sample": float("nan")}, "sample must be 0"),
        ({"export": "zipkin"}, "none of 'file', 'otlp'"),
        ({"export": "otlp", "endpoint": "127.0.0.1:4317"}, "must be a URL"),
        ({"folder": ""}, "folder is empty"),
        ({"queue": 0}, "queue at least 1"),
        ({"max_file_mb": 0.0}, "max_file_mb"),
        ({"smaple": 1.0}, "did you mean 'sample'"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        from_mapping(TracingConfig, values)


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_queue.importlib.util, "find_spec", lambda name: None)
    config = TracingConfig(sample=1.0, export="otlp")
    with pytest.raises(ConfigError, match=r"pip install 'vla-runtime\[otel\]'"):
        check_tracing(config)
    with pytest.raises(ConfigError, match=r"pip install"), tracing(config, "vla-io", "arm1", SystemClock()):
        pass
    check_tracing(TracingConfig(export="otlp"))  # off: nothing is missing
    check_tracing(TracingConfig(sample=1.0))


def test_a_half_installed_package_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_queue.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "vla_common.otel", None)
    config = TracingConfig(sample=1.0, export="otlp")
    with pytest.raises(ConfigError, match=r"pip install"), tracing(config, "vla-io", "arm1", SystemClock()):
        pass


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = TracingConfig(sample=1.0, folder=str(tmp_path / "file" / "x"))
    with pytest.raises(ConfigError, match="tracing.folder"), tracing(config, "vla-io", "arm1", SystemClock()):
        pass


# a collector


class Collector(http.server.ThreadingHTTPServer):
    """Takes OTLP over HTTP and keeps the bodies; ``status``: what it answers."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        self.server.bodies.append(body)
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.skipif(not HAS_OTEL, reason="opentelemetry is not installed: pip install 'vla-runtime[otel]'")
def test_a_collector_gets_the_same_ids_and_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vla_common.otel.TIMEOUT_S", 60.0)
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    collector, clock = Collector(), ManualClock()
    try:
        config = TracingConfig(sample=1.0, export="otlp", endpoint=collector.endpoint)
        with tracing(config, "vla-worker", "p0.1", clock) as tracer:
            tracer.span(TRACE, CALLER, b"", "root", 100, 900, request_id="r", tokens=3, ok=True, s=0.5)
            tracer.span(TRACE, span_id(TRACE, "x"), CALLER, "x", 200, 300, "INTERNAL: broke")
        spans, origin = [], {}
        for body in collector.bodies:
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                origin.update({pair.key: pair.value.string_value for pair in resource.resource.attributes})
                spans += [one for scope in resource.scope_spans for one in scope.spans]
        assert origin["service.name"] == "vla-worker" and origin["service.instance.id"] == "p0.1"
        root, child = sorted(spans, key=lambda one: one.start_time_unix_nano)
        assert (root.trace_id, root.span_id, root.parent_span_id, root.name) == (TRACE, CALLER, b"", "root")
        assert (child.trace_id, child.span_id, child.parent_span_id) == (TRACE, span_id(TRACE, "x"), CALLER)
        wall_ns = clock.wall_ns()
        assert (root.start_time_unix_nano - wall_ns, root.end_time_unix_nano - wall_ns) == (100, 900)
        assert {pair.key for pair in root.attributes} == {"request_id", "tokens", "ok", "s"}
        assert (child.status.code, child.status.message) == (2, "INTERNAL: broke") and root.status.code == 0
    finally:
        collector.shutdown()
        collector.server_close()


@pytest.mark.skipif(not HAS_OTEL, reason="opentelemetry is not installed: pip install 'vla-runtime[otel]'")
def test_a_collector_that_refuses_costs_its_spans_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    from vla_common.otel import OtlpExporter

    collector = Collector()
    collector.status = 400
    try:
        exporter = OtlpExporter(collector.endpoint, "vla-io", "arm1")
        with caplog.at_level(logging.WARNING):
            queue = SpanQueue(exporter, SystemClock(), 10)
            queue.put(span(0))
            queue.close()
        assert queue.lost == 1 and "did not take 1 spans" in caplog.text
        assert all(record.name == "vla_common.span_queue" for record in caplog.records)
    finally:
        collector.shutdown()
        collector.server_close()


def test_the_file_is_otlp_as_a_collector_reads_it(tmp_path: Path) -> None:
    """Hexadecimal ids, 64-bit numbers as strings, enums as numbers: the rules of OTLP's JSON form."""
    file = SpanFile.create(tmp_path, "vla-io", "arm1", 1 << 20)
    file.export([span(0, error="no")], 1_700_000_000_000_000_000)
    file.close()
    (line,) = file.path.read_text().splitlines()
    (scope,) = json.loads(line)["resourceSpans"][0]["scopeSpans"]
    (one,) = scope["spans"]
    assert one["traceId"] == TRACE.hex() and one["parentSpanId"] == CALLER.hex() and one["kind"] == 1
    assert one["startTimeUnixNano"] == "1700000000000000100" and one["status"] == {"code": 2, "message": "no"}
    assert one["attributes"] == [{"key": "n", "value": {"intValue": "0"}}]
    if HAS_OTEL:
        from google.protobuf import json_format
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        json_format.Parse(line, ExportTraceServiceRequest())  # its ids are base64 there: the names and types must fit
