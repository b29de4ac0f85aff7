"""``vla trace``: the spans of several processes as one tree, in the terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vla_cli.trace_tree import Trace, of_request, of_robot, render, summary, traces_of
from vla_common.span_file import read_spans

EXIT_OK, EXIT_NONE = 0, 1
LISTED: Final = 20


def parser() -> argparse.ArgumentParser:
    """Command line of ``vla trace``."""
    p = argparse.ArgumentParser(
        prog="vla trace", description="Merge the span files of all processes and print a trace as a tree; without a "
        "choice, list the newest traces. Times are of each machine's own clock: a difference between machines shows.",
        epilog="Files come of 'tracing: {sample: ..., export: file, folder: ...}' in cloud.yaml and edge.yaml.")
    p.add_argument("files", type=Path, nargs="+", metavar="FILE", help="span files, or folders of them")
    choice = p.add_mutually_exclusive_group()
    choice.add_argument("--request", metavar="ID", help="the chat request of this id")
    choice.add_argument("--robot", metavar="NAME", help="the newest observation of this robot that led to a command")
    choice.add_argument("--trace", metavar="HEX", help="the trace whose id begins so")
    p.add_argument("--latest", action="store_true", help="with --robot: the newest one, wherever it ended")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if there is no such trace or no file, 2 for a wrong command line."""
    args = parser().parse_args(argv)
    try:
        return _show(args)
    except BrokenPipeError:  # the reader, such as 'head', has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _show(args: argparse.Namespace) -> int:
    try:
        spans, unread = read_spans(args.files)
    except FileNotFoundError as error:
        print(f"vla trace: {error.filename}: {error.strerror}", file=sys.stderr)
        return EXIT_NONE
    if unread:
        print(f"vla trace: {unread} lines could not be read (the last one of a killed process may be cut)",
              file=sys.stderr)
    traces = traces_of(spans)
    if not (args.request or args.robot or args.trace):
        print("\n".join(summary(trace) for trace in traces[-LISTED:]) or "no spans", flush=True)
        return EXIT_OK if traces else EXIT_NONE
    chosen = _chosen(args, traces)
    if not chosen:
        print(f"vla trace: no such trace among {len(traces)}: is tracing.sample above 0, and are the files of all "
              "processes given?", file=sys.stderr)
        return EXIT_NONE
    print("\n\n".join(render(trace) for trace in chosen), flush=True)
    return EXIT_OK


def _chosen(args: argparse.Namespace, traces: list[Trace]) -> list[Trace]:
    if args.request:
        return of_request(traces, args.request)
    if args.robot:
        return of_robot(traces, args.robot, whole=not args.latest)[-1:]
    return [trace for trace in traces if trace.id.startswith(args.trace.lower())]


if __name__ == "__main__":
    sys.exit(main())
