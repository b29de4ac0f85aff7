"""`vla export`: write the ONNX graphs of a model folder again, or only check them."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vla_common.manifest import Manifest, ManifestError

if TYPE_CHECKING:
    from vla_models.flow_head import FlowHead

EXIT_OK, EXIT_FAILED, EXIT_REFUSED = 0, 1, 2


def parser() -> argparse.ArgumentParser:
    """Command line of `vla export`."""
    p = argparse.ArgumentParser(
        prog="vla export",
        description="Write context_kv.onnx and denoise.onnx of a model folder again, check them against torch over "
        "random inputs and against what TensorRT takes, and write the manifest. Needs the extra [train].",
        epilog="Exit status: 0 all checks passed, 1 a check failed, 2 the folder or the command line is refused.",
    )
    p.add_argument("--model", type=Path, default=Path("models/tabletop"), help="folder with head.safetensors")
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="folder to write (may be the same one)")
    what.add_argument("--check", action="store_true", help="write nothing, check the folder of --model")
    p.add_argument("--steps", type=int, help="Euler steps unrolled in the graph (default: as trained)")
    p.add_argument("--fp16", action="store_true", help="also write denoise_fp16.onnx, for TensorRT in half precision")
    return p


def main(argv: list[str] | None = None) -> int:
    """Export or check; see the epilog of the help for what is returned."""
    args = parser().parse_args(argv)
    if args.steps is not None and args.steps < 1:
        return _refuse("--steps must be at least 1")
    if args.check and (args.steps is not None or args.fp16):
        return _refuse("--check writes nothing: leave out --steps and --fp16")
    from vla_models.model_folder import load_head  # torch only when needed

    try:
        head, manifest = load_head(args.model)
        if args.check:
            return check(args.model, head, manifest)
        return check(args.out, *_export(args, head, manifest))
    except ManifestError as error:
        return _refuse(str(error))
    except RuntimeError as error:
        print(f"vla export: {error}", file=sys.stderr)
        return EXIT_FAILED


def check(folder: Path, head: FlowHead, manifest: Manifest) -> int:
    """Check the graphs of a verified folder: opset, operators, inputs and outputs, numbers. Prints one line each."""
    from vla_models import export_onnx
    from vla_models.graph_check import check_graph
    from vla_models.model_folder import graph_shapes

    shapes = graph_shapes(head)
    expected = {**shapes, export_onnx.DENOISE_FP16: shapes[export_onnx.DENOISE]}
    graphs = [name for name in manifest.files if name.endswith(".onnx")]
    problems = [f"{name} is not in the manifest: export the model again" for name in sorted(set(shapes) - set(graphs))]
    for name in graphs:
        report = check_graph(folder / name, expected.get(name))
        print(report)
        problems += report.problems
    if not problems:
        for name in (name for name in graphs if name != export_onnx.CONTEXT_KV):
            difference = export_onnx.check_export(head, folder, file=name)
            print(f"{name}: {head.config.euler_steps} Euler steps, differs from torch by at most {difference:.1e} rad")
            if not difference <= export_onnx.MAX_DIFFERENCE_RAD[name]:
                problems.append(f"{name} may differ by {export_onnx.MAX_DIFFERENCE_RAD[name]:.0e} rad at most")
    for problem in problems:
        print(f"vla export: {folder}: {problem}", file=sys.stderr)
    print(f"{folder}: {'FAILED' if problems else 'ok'}, model hash {manifest.model_hash.hex()[:12]}")
    return EXIT_FAILED if problems else EXIT_OK


def _export(args: argparse.Namespace, head: FlowHead, manifest: Manifest) -> tuple[FlowHead, Manifest]:
    from vla_models.model_folder import load_vlm, write_model_folder

    vlm, _ = load_vlm(args.model)
    if args.steps is not None:
        head.config = dataclasses.replace(head.config, euler_steps=args.steps)
    written = write_model_folder(
        args.out,
        manifest.name,
        vlm,
        head,
        joint_names=manifest.joint_names,
        proprio_names=manifest.proprio_names,
        cameras=manifest.cameras,
        vocabulary=manifest.instruction.vocabulary,
        period_s=manifest.period_s,
        licence=manifest.licence,
        training_command=manifest.training_command,
        seeds=manifest.seeds,
        metrics=manifest.metrics,
        fp16=args.fp16,
    )
    return head, written


def _refuse(message: str) -> int:
    print(f"vla export: {message}", file=sys.stderr)
    return EXIT_REFUSED
