"""`vla export`: write the ONNX graphs of a model folder again and check them against torch."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

from vla_common.manifest import ManifestError


def parser() -> argparse.ArgumentParser:
    """Command line of `vla export`."""
    p = argparse.ArgumentParser(
        prog="vla export",
        description="Write context_kv.onnx and denoise.onnx of a model folder again, check them against torch over "
        "random inputs, and write the manifest. Needs the extra [train].",
    )
    p.add_argument("--model", type=Path, default=Path("models/tabletop"), help="folder with head.safetensors")
    p.add_argument("--out", type=Path, required=True, help="folder to write (may be the same one)")
    p.add_argument("--steps", type=int, help="Euler steps unrolled in the graph (default: as trained)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Export; 0 when the check passed, 2 for a folder that is refused."""
    args = parser().parse_args(argv)
    from vla_models.model_folder import load_head, load_vlm, write_model_folder  # torch only when needed

    try:
        vlm, manifest = load_vlm(args.model)
        head, _ = load_head(args.model)
    except ManifestError as error:
        print(f"vla export: {error}", file=sys.stderr)
        return 2
    if args.steps is not None:
        if args.steps < 1:
            print("vla export: --steps must be at least 1", file=sys.stderr)
            return 2
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
    )
    difference = written.metrics["onnx_max_difference"]
    print(f"{args.out}: {head.config.euler_steps} Euler steps, differs from torch by at most {difference:.1e} rad")
    return 0
